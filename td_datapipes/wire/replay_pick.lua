-- Choose rows of a ring, and count them where it limits how often rows are drawn.
--
-- KEYS[1]  the ring's state, KEYS[2] what this sampler's last counted call was answered.
-- ARGV[1]  what the ring's other keys begin with; they lie in the same slot.
-- ARGV[2]  how: "none" (only count; the caller chooses), "fifo" (the oldest that nobody got this way), "uniform",
--          "priority" (in proportion to priorities).
-- ARGV[3]  number of rows (of slices: slices).
-- ARGV[4]  numbers in [0, 1), little-endian doubles, ascending, one a row; further ones are made from the first.
-- ARGV[5]  links to follow from each row, 0 for none; a row with fewer successors is not chosen.
-- ARGV[6]  "slice": return every row on the way; or "n_step": stop behind a row that is done.
-- ARGV[7]  the discount of a reward a step later.
-- ARGV[8]  "1": no row twice.
-- ARGV[9]  the number of this call, counted by its sampler ("" where it counts as no samples).
-- ARGV[10] seconds for which the answer is kept.
-- Returns  {"OK", cursor, incarnation, total weight, choices, links}: choices are pairs (write number, weight); links
--          are for slices the write numbers of every row on the way, for n_step (last write number, links followed,
--          discounted reward, flags). All doubles. fifo gives the first write number as total weight.
--          {"GONE"}; {"WAIT", rows written, samples drawn}; {"FEW", rows there are};
--          {"SPARSE"} where hardly any row qualifies and there are too many to look at each.
--include replay_tree
local state = redis.call('HMGET', KEYS[1], 'cursor', 'incarnation', 'capacity', 'levels', 'samples',
  'samples_per_insert', 'min_size', 'min_diff', 'fifo')
if not state[1] then
  return {'GONE'}
end
local prefix, how, count, call = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[9]
local cursor, capacity = tonumber(state[1]), tonumber(state[3])
if call ~= '' then
  local answered = redis.call('GET', KEYS[2])
  if answered then
    local kept = cmsgpack.unpack(answered)
    if kept[1] == call then
      return kept[2]
    end
  end
end
local size = math.min(cursor, capacity)
if call ~= '' and state[6] ~= '' then
  local diff = cursor * tonumber(state[6]) - tonumber(state[5])
  if size < tonumber(state[7]) or diff - count < tonumber(state[8]) then
    return {'WAIT', state[1], state[5]}
  end
end
if size == 0 and count > 0 then
  return {'FEW', '0'}
end

local function finish(total, choices, links)
  local answer = {'OK', state[1], state[2], string.format('%.17g', total), choices, links}
  if call ~= '' then
    redis.call('HINCRBY', KEYS[1], 'samples', count)
    redis.call('SET', KEYS[2], cmsgpack.pack({call, answer}), 'EX', ARGV[10])
  end
  return answer
end

if how == 'none' then
  return finish(size, '', '')
end
if how == 'fifo' then
  local first = math.max(tonumber(state[9]), cursor - size)
  if cursor - first < count then
    return {'FEW', string.format('%.0f', cursor - first)}
  end
  redis.call('HSET', KEYS[1], 'fifo', string.format('%.0f', first + count))
  return finish(first + 1, '', '')
end

local levels = tonumber(state[4])
local total = size
if how == 'priority' then
  total = tree_total(prefix, levels)
  if total == 0 and size > 0 and redis.call('STRLEN', prefix .. 'p0') == 0 then
    return {'GONE'}
  end
end
if count == 0 then
  return finish(total, '', '')
end
if total <= 0 then
  return {'FEW', '0'}
end

local hops, slices, discount, once = tonumber(ARGV[5]), ARGV[6] == 'slice', tonumber(ARGV[7]), ARGV[8] == '1'
local link_cache, nodes_kept = {}, tree_cache(levels, capacity, count)
local function link_of(number)
  local link = link_cache[number]
  if not link then
    local at = ((number - 1) % capacity) * 32
    local found = redis.call('GETRANGE', prefix .. 'links', at, at + 23)
    if #found < 24 then
      return nil
    end
    local follower, reward, flags = struct.unpack('<ddd', found)
    link = {follower, reward, flags}
    link_cache[number] = link
  end
  return link
end

-- What `links` says of a row, or nil where it lacks a successor.
local function follow(number)
  if hops == 0 then
    return ''
  end
  local way, reward, factor, flags, here = {struct.pack('<d', number)}, 0, 1, 0, number
  for hop = 1, hops do
    local link = link_of(here)
    if not link or link[1] == 0 then
      return nil
    end
    here = link[1]
    if slices then
      way[hop + 1] = struct.pack('<d', here)
    else
      reward, factor, flags = reward + factor * link[2], factor * discount, link[3]
      if flags ~= 0 or hop == hops then
        return struct.pack('<dddd', here, hop, reward, flags)
      end
    end
  end
  return table.concat(way)
end

local function draw(at)
  if how == 'uniform' then
    return cursor - size + 1 + math.floor(at * size), 1
  end
  local slot, weight = tree_find(prefix, levels, at * total, nodes_kept)
  local number = cursor - (cursor - 1 - slot) % capacity
  return number, (slot < capacity and number >= 1) and weight or 0
end

local chosen, ways, taken = {}, {}, {}
local function take(number, weight)
  if weight <= 0 or (once and taken[number]) then
    return false
  end
  local way = follow(number)
  if not way then
    return false
  end
  taken[number] = true
  chosen[#chosen + 1] = struct.pack('<dd', number, weight)
  ways[#ways + 1] = way
  return true
end

math.randomseed(math.floor(struct.unpack('<d', ARGV[4], 1) * 2147483647))
local refused = 0
for i = 1, count do
  if not take(draw((struct.unpack('<d', ARGV[4], 8 * i - 7)))) then
    refused = refused + 1
  end
end
local tries = 64 * refused + 256
while refused > 0 and tries > 0 do
  tries = tries - 1
  if take(draw(math.random())) then
    refused = refused - 1
  end
end
if refused > 0 then
  -- Hardly any row qualifies: list those that do.
  if size > 262144 then
    return {'SPARSE'}
  end
  local listed, sum = {}, 0
  for number = cursor - size + 1, cursor do
    if not (once and taken[number]) and follow(number) then
      local weight = 1
      if how == 'priority' then
        local slot = (number - 1) % capacity
        local node = tree_nodes(prefix, 0, math.floor(slot / FAN), 1)
        weight = struct.unpack('<d', node, slot % FAN * 8 + 1)
      end
      if weight > 0 then
        sum = sum + weight
        listed[#listed + 1] = {number, weight, sum}
      end
    end
  end
  if #listed < (once and refused or 1) then
    return {'FEW', string.format('%.0f', #listed + #chosen)}
  end
  if once then
    -- The first of independent exponential clocks, each running at its row's weight.
    for _, entry in ipairs(listed) do
      entry[3] = -math.log(1 - math.random()) / entry[2]
    end
    table.sort(listed, function(one, other) return one[3] < other[3] end)
    for i = 1, refused do
      take(listed[i][1], listed[i][2])
    end
  else
    for _ = 1, refused do
      local target, low, high = math.random() * sum, 1, #listed
      while low < high do
        local middle = math.floor((low + high) / 2)
        if listed[middle][3] > target then high = middle else low = middle + 1 end
      end
      take(listed[low][1], listed[low][2])
    end
  end
end
return finish(total, table.concat(chosen), table.concat(ways))
