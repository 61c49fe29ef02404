-- Write many ranges of chunks in one call, unless something has changed since they were planned: all of them, or none.
--
-- KEYS     the chunks, each once, then the keys that must hold what they held; all in one slot. One more key where
--          the ranges follow in a transaction that watches it: it is set (and deleted) where something has
--          changed, and the transaction then does nothing.
-- ARGV[1]  how many of the keys are chunks, ARGV[2] how many must hold what they held.
-- ARGV[3]  for each chunk how long it has to be, u32, little-endian: a chunk that is gone must not come back as zeros.
-- ARGV[4]  ranges, 12 bytes each, little-endian: u32 number of the key (from 0), u32 first byte, u32 length.
-- ARGV[5]  the ranges' bytes, one behind the other.
-- ARGV[6...]  for each further key, "=" and the string it holds, or "#" and the fields shape and dtype of its hash,
--          a line feed between them.
-- Returns  "OK", or "STALE <number of the key, from 1>"; nothing is written then.
local chunks, guards = tonumber(ARGV[1]), tonumber(ARGV[2])
local watched = KEYS[chunks + guards + 1]
local function stale(answer)
  if watched then
    redis.call('SET', watched, '')
    redis.call('DEL', watched)
  end
  return answer
end
for i = 1, guards do
  local key, expected, found = KEYS[chunks + i], ARGV[5 + i]
  if string.sub(expected, 1, 1) == '#' then
    found = redis.pcall('HMGET', key, 'shape', 'dtype')
    if not found.err then
      found = '#' .. (found[1] or '') .. '\n' .. (found[2] or '')
    end
  else
    found = redis.pcall('GET', key)
    if type(found) ~= 'table' then
      found = '=' .. (found or '')
    end
  end
  if found ~= expected then
    return stale(redis.status_reply('STALE ' .. chunks + i))
  end
end
local needed = ARGV[3]
for i = 1, chunks do
  local length = redis.pcall('STRLEN', KEYS[i])
  if type(length) == 'table' then
    return stale(length)
  end
  if length < struct.unpack('<I4', needed, 4 * i - 3) then
    return stale(redis.status_reply('STALE ' .. i))
  end
end
local packed, data = ARGV[4], ARGV[5]
local position, from = 1, 1
for _ = 1, #packed / 12 do
  local key, first, length
  key, first, length, position = struct.unpack('<I4I4I4', packed, position)
  redis.call('SETRANGE', KEYS[key + 1], first, string.sub(data, from, from + length - 1))
  from = from + length
end
return redis.status_reply('OK')
