-- From here on, the chunks of a shard take nothing from earlier appenders.
--
-- KEYS[1]  the shard's fence.
-- ARGV[1]  this appender's number.
-- Returns  "OK", or "FENCED" where a later one was here already.
local fence = tonumber(redis.call('GET', KEYS[1]) or '0')
if fence > tonumber(ARGV[1]) then
  return 'FENCED'
end
redis.call('SET', KEYS[1], ARGV[1])
return 'OK'
