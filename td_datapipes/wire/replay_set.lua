-- Write over rows of a ring where they lie; their write numbers stay.
--
-- KEYS[1]  the ring's state.
-- ARGV[1]  what the ring's other keys begin with; they lie in the same slot.
-- ARGV[2]  slots, little-endian doubles.
-- ARGV[3]  their records, in the same order.
-- Returns  {"OK", cursor, incarnation}; {"GONE"}; {"FROZEN"}; {"BEYOND", rows there are} where a slot was never
--          written: nothing is changed then.
local state = redis.call('HMGET', KEYS[1], 'cursor', 'incarnation', 'capacity', 'records_per_chunk', 'stride_bytes',
  'stripes', 'stripe', 'frozen')
if not state[1] then
  return {'GONE'}
end
if state[8] == '1' then
  return {'FROZEN'}
end
local cursor, capacity, per_chunk = tonumber(state[1]), tonumber(state[3]), tonumber(state[4])
local stride, count = tonumber(state[5]), #ARGV[2] / 8
local slots = {}
for i = 1, count do
  slots[i] = struct.unpack('<d', ARGV[2], 8 * i - 7)
  if slots[i] >= math.min(cursor, capacity) then
    return {'BEYOND', string.format('%.0f', math.min(cursor, capacity))}
  end
end
for i, slot in ipairs(slots) do
  local chunk = math.floor(slot / per_chunk) * tonumber(state[6]) + tonumber(state[7])
  local number = cursor - (cursor - 1 - slot) % capacity
  -- The record's own first 8 bytes give way to the number, and the whole is written at once.
  local record = struct.pack('<i8', number) .. ARGV[3]:sub((i - 1) * stride + 9, i * stride)
  redis.call('SETRANGE', ARGV[1] .. '0:' .. string.format('%08x', chunk), slot % per_chunk * stride, record)
end
redis.call('HINCRBY', KEYS[1], 'sets', 1)
return {'OK', state[1], state[2]}
