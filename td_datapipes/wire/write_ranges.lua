-- Write many ranges of chunks in one call, unless something has changed since they were planned: all of them, or none.
--
-- KEYS     the chunks, each once, then the keys that must hold what they held; all in one slot.
-- ARGV[1]  how many of the keys are chunks.
-- ARGV[2]  for each chunk how long it has to be, u32, little-endian: a chunk that is gone must not come back as zeros.
-- ARGV[3]  ranges, 12 bytes each, little-endian: u32 number of the key (from 0), u32 first byte, u32 length.
-- ARGV[4]  the ranges' bytes, one behind the other.
-- ARGV[5...]  for each further key, "=" and the string it holds, or "#" and the fields shape and dtype of its hash,
--          a line feed between them.
-- Returns  "OK", or "STALE <number of the key, from 1>"; nothing is written then.
local chunks = tonumber(ARGV[1])
for i = chunks + 1, #KEYS do
  local expected = ARGV[4 + i - chunks]
  local found
  if string.sub(expected, 1, 1) == '#' then
    local fields = redis.call('HMGET', KEYS[i], 'shape', 'dtype')
    found = '#' .. (fields[1] or '') .. '\n' .. (fields[2] or '')
  else
    found = '=' .. (redis.call('GET', KEYS[i]) or '')
  end
  if found ~= expected then
    return 'STALE ' .. i
  end
end
local needed = ARGV[2]
for i = 1, chunks do
  if redis.call('STRLEN', KEYS[i]) < struct.unpack('<I4', needed, 4 * i - 3) then
    return 'STALE ' .. i
  end
end
local packed, data = ARGV[3], ARGV[4]
if #packed == 12 then
  local key, first = struct.unpack('<I4I4', packed)
  redis.call('SETRANGE', KEYS[key + 1], first, data)
  return 'OK'
end
local position, from = 1, 1
for _ = 1, #packed / 12 do
  local key, first, length
  key, first, length, position = struct.unpack('<I4I4I4', packed, position)
  redis.call('SETRANGE', KEYS[key + 1], first, string.sub(data, from, from + length - 1))
  from = from + length
end
return 'OK'
