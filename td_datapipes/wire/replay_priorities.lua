-- Give rows of a ring new priorities, unless they have been overwritten.
--
-- KEYS[1]  the ring's state.
-- ARGV[1]  what the ring's other keys begin with; they lie in the same slot.
-- ARGV[2]  the incarnation the rows were drawn from.
-- ARGV[3]  pairs (write number, priority) of little-endian doubles, ascending by slot, no slot twice.
-- Returns  {"OK", cursor, incarnation, one byte a row: "1" where it is gone}; {"GONE"}; {"FROZEN"}.
--include replay_tree
--include replay_lineage
local state = redis.call('HMGET', KEYS[1], 'cursor', 'incarnation', 'capacity', 'levels', 'max_priority', 'frozen',
  'former')
if not state[1] then
  return {'GONE'}
end
if state[6] == '1' then
  return {'FROZEN'}
end
local prefix, pairs_ = ARGV[1], ARGV[3]
local cursor, capacity, highest = tonumber(state[1]), tonumber(state[3]), tonumber(state[5])
local gone, nodes, raised = {}, {}, false
local newest = lineage_last(ARGV[2], cursor, state[2], state[7] or '')
for i = 1, #pairs_ / 16 do
  local number, priority = struct.unpack('<dd', pairs_, 16 * i - 15)
  if number > newest or number <= cursor - capacity or number < 1 then
    gone[i] = '1'
  else
    gone[i] = '0'
    local slot = (number - 1) % capacity
    redis.call('SETRANGE', prefix .. 'p0', slot * 8, struct.pack('<d', priority))
    local node, last = math.floor(slot / FAN), nodes[#nodes]
    if not last or node >= last[1] + last[2] then
      if last and node == last[1] + last[2] then
        last[2] = last[2] + 1
      else
        nodes[#nodes + 1] = {node, 1}
      end
    end
    if priority > highest then
      highest, raised = priority, true
    end
  end
end
tree_refresh(prefix, tonumber(state[4]), nodes)
if raised then
  redis.call('HSET', KEYS[1], 'max_priority', string.format('%.17g', highest))
end
return {'OK', state[1], state[2], table.concat(gone)}
