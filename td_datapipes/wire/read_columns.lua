-- Read the same rows of many chunks in one call: of each chunk one string, its rows one behind the other.
--
-- KEYS     the chunks, each holding all rows of its own; all in one slot.
-- ARGV[1]  row numbers, u32, little-endian, in the order wanted.
-- ARGV[2]  for each chunk, 12 bytes, little-endian: u32 bytes from row to row, u32 first byte wanted of a row, u32 length.
-- Returns  one string a chunk, or an error in its place. Of a chunk that is missing or short it is shorter: the caller
--          knows every length.
local packed, columns = ARGV[1], ARGV[2]
local call, concat = redis.pcall, table.concat
local rows, position = {}, 1
local count = #packed / 4
for i = 1, count do
  rows[i], position = struct.unpack('<I4', packed, position)
end
local result = {}
for k = 1, #KEYS do
  local key, parts = KEYS[k], {}
  local stride, first, length = struct.unpack('<I4I4I4', columns, 12 * k - 11)
  for i = 1, count do
    local start = rows[i] * stride + first
    parts[i] = call('GETRANGE', key, start, start + length - 1)
  end
  -- The chunk is a string, then all are, or else none is and each is the same error.
  result[k] = type(parts[1]) == 'string' and concat(parts) or parts[1]
end
return result
