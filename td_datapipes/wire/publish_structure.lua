-- Publish another structure of a mutable data set, if its name still stands where the writer found it.
--
-- KEYS[1]  the manifest, KEYS[2] the staged hash, KEYS[3] the structure's generation of one data set.
-- KEYS[4...]  what the new structure has no use for: removed, unless nothing is published.
-- ARGV[1]  the new manifest (JSON), ARGV[2] its generation.
-- ARGV[3]  "<id> <generation>" the writer found published, or "" where it found none.
-- ARGV[4]  the staged id, which is taken off the staged hash; "" where nothing was staged.
-- Returns  "GONE" where the staged id is not on the hash any more: its chunks may have been removed.
--          "OK", or "CONFLICT <id> <generation>" with what is published now; nothing is changed then.
local current = redis.call('GET', KEYS[1])
local found = ''
if current then
  local manifest = cjson.decode(current)
  found = manifest.id .. ' ' .. string.format('%d', manifest.generation)
end
if found ~= ARGV[3] then
  return 'CONFLICT ' .. found
end
if ARGV[4] ~= '' and redis.call('HEXISTS', KEYS[2], ARGV[4]) == 0 then
  return 'GONE'
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[3], ARGV[2])
redis.call('HDEL', KEYS[2], ARGV[4])
for i = 4, #KEYS do
  redis.call('UNLINK', KEYS[i])
end
return 'OK'
