-- Publish a manifest, if the name still stands where the writer found it.
--
-- KEYS[1]  the manifest, KEYS[2] the staged hash, KEYS[3] the superseded hash of one name.
-- ARGV[1]  the new manifest (JSON).
-- ARGV[2]  "<id> <generation>" the writer found published, or "" where it found none.
-- ARGV[3]  the staged id, which is taken off the staged hash.
-- ARGV[4]  seconds since 1970, kept beside the manifest that is superseded.
-- Returns  "OK", or "CONFLICT <id> <generation>" with what is published now; nothing is changed then.
--          "GONE" where the staged id is not on the hash any more: its chunks may have been removed.
local current = redis.call('GET', KEYS[1])
if current == ARGV[1] then
  return 'OK' -- this very call, sent again because its answer was lost
end
local found = ''
if current then
  local manifest = cjson.decode(current)
  found = manifest.id .. ' ' .. string.format('%d', manifest.generation)
end
if found ~= ARGV[2] then
  return 'CONFLICT ' .. found
end
if redis.call('HEXISTS', KEYS[2], ARGV[3]) == 0 then
  return 'GONE'
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[3])
if current then
  redis.call('HSET', KEYS[3], found, ARGV[4] .. ' ' .. current)
end
return 'OK'
