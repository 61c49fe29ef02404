-- Write records behind the published ones of a chunk, unless a later appender has taken over.
--
-- KEYS[1]  the chunk, KEYS[2] its shard's fence.
-- ARGV[1]  this appender's number, ARGV[2] the first byte to write, ARGV[3] the bytes.
-- Returns  "OK"; "FENCED"; or "SHORT <bytes>" where the chunk has lost published records.
local fence = tonumber(redis.call('GET', KEYS[2]) or '0')
if fence > tonumber(ARGV[1]) then
  return 'FENCED'
end
local first = tonumber(ARGV[2])
if first == 0 then
  redis.call('SET', KEYS[1], ARGV[3])
  return 'OK'
end
local length = redis.call('STRLEN', KEYS[1])
if length < first then
  return 'SHORT ' .. length
end
redis.call('SETRANGE', KEYS[1], first, ARGV[3])
return 'OK'
