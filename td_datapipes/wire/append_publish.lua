-- Publish the manifest of an append, if this is still the writer that appends and the name stands where it began.
--
-- KEYS[1]  the manifest, KEYS[2] the staged hash, KEYS[3] who appends now, KEYS[4] how many began to.
-- ARGV[1]  the new manifest (JSON), ARGV[2] "<id> <generation>" it began from, ARGV[3] the staged id.
-- ARGV[4]  this writer's number.
-- Returns  "OK", "FENCED", or "CONFLICT <id> <generation>" with what is published now; nothing is changed then.
local current = redis.call('GET', KEYS[1])
if current == ARGV[1] then
  return 'OK' -- this very call, sent again because its answer was lost
end
if redis.call('GET', KEYS[4]) ~= ARGV[4] then
  return 'FENCED'
end
local found = ''
if current then
  local manifest = cjson.decode(current)
  found = manifest.id .. ' ' .. string.format('%d', manifest.generation)
end
if found ~= ARGV[2] then
  return 'CONFLICT ' .. found
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[3])
redis.call('DEL', KEYS[3])
return 'OK'
