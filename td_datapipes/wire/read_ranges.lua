-- Read many ranges of chunks in one call: one consistent snapshot of all of them.
--
-- KEYS     the chunks, each once; all in one slot.
-- ARGV[1]  ranges, 12 bytes each, little-endian: u32 number of the key (from 0), u32 first byte, u32 last byte (inclusive).
-- Returns  one string a range, or an error in its place, in order: the caller sees which chunk it is about. A missing
--          chunk gives an empty string, as GETRANGE does: the caller knows every length and sees it.
local packed = ARGV[1]
local result = {}
local position = 1
for i = 1, #packed / 12 do
  local key, first, last
  key, first, last, position = struct.unpack('<I4I4I4', packed, position)
  result[i] = redis.pcall('GETRANGE', KEYS[key + 1], first, last)
end
return result
