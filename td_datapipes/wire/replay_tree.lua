-- A tree of sums over priorities, included by other scripts: level 0 holds one little-endian double a slot, each level
-- above one sum for 16 entries of the level below, and the highest at most 16. Parents are always summed anew from
-- their children, so rounding errors do not add up. A fan-out of 16 was the fastest of 8, 16, 32 and 64 at a million
-- rows: below it more nodes are read, above it more numbers are scanned.
local FAN = 16
local NODE_BYTES = 8 * FAN
local TWO = '<dddddddd'

-- `count` adjacent nodes of a level in one string; what was never written counts as 0.
local function tree_nodes(prefix, level, first, count)
  local nodes = redis.call('GETRANGE', prefix .. 'p' .. level, first * NODE_BYTES, (first + count) * NODE_BYTES - 1)
  if #nodes < count * NODE_BYTES then
    nodes = nodes .. string.rep('\0', count * NODE_BYTES - #nodes)
  end
  return nodes
end

-- Sum nodes into their parents, level by level. `runs` lists {first node, number of nodes}, ascending.
local function tree_refresh(prefix, levels, runs)
  for level = 0, levels - 2 do
    local above = {}
    for _, run in ipairs(runs) do
      local first, count = run[1], run[2]
      local nodes, sums = tree_nodes(prefix, level, first, count), {}
      for i = 1, count do
        local at = (i - 1) * NODE_BYTES + 1
        local a, b, c, d, e, f, g, h = struct.unpack(TWO, nodes, at)
        local p, q, r, s, t, u, v, w = struct.unpack(TWO, nodes, at + 64)
        sums[i] = struct.pack('<d', a + b + c + d + e + f + g + h + p + q + r + s + t + u + v + w)
      end
      redis.call('SETRANGE', prefix .. 'p' .. (level + 1), first * 8, table.concat(sums))
      local low, high = math.floor(first / FAN), math.floor((first + count - 1) / FAN)
      local last = above[#above]
      if last and low <= last[1] + last[2] then
        last[2] = math.max(last[2], high - last[1] + 1)
      else
        above[#above + 1] = {low, high - low + 1}
      end
    end
    runs = above
  end
end

local function tree_total(prefix, levels)
  local root, total = tree_nodes(prefix, levels - 1, 0, 1), 0
  for at = 1, NODE_BYTES, 8 do
    total = total + struct.unpack('<d', root, at)
  end
  return total
end

-- What nodes are kept in while `count` slots are found in a tree of `slots`: of a level that most of them are needed
-- of, adjacent ones are read together.
local function tree_cache(levels, slots, count)
  local cache, nodes = {}, slots
  for level = 0, levels - 1 do
    nodes = math.ceil(nodes / FAN)
    cache[level] = {together = nodes <= 4 * count and 64 or 1, low = 0, high = 0}
  end
  return cache
end

-- The slot at which the running sum of priorities passes `target`, and its priority. Nodes are kept in `cache`, and the
-- last way down: targets ascend as a rule, so most of them lie below a node of it, and the levels above are skipped.
local function tree_find(prefix, levels, target, cache)
  local number, weight, highest, rest = 0, 0, levels - 1, target
  for level = 0, levels - 2 do
    local way = cache[level]
    if target >= way.low and target < way.high then
      number, highest, rest = way.number, level, target - way.low
      break
    end
  end
  for level = highest, 0, -1 do
    local kept = cache[level]
    local within = number % kept.together
    local first = number - within
    local nodes = kept[first]
    if not nodes then
      nodes = tree_nodes(prefix, level, first, kept.together)
      kept[first] = nodes
    end
    local at, child = within * NODE_BYTES + 1, 0
    local a, b, c, d, e, f, g, h = struct.unpack(TWO, nodes, at)
    local half = a + b + c + d + e + f + g + h
    if rest >= half then
      rest, child = rest - half, 8
      a, b, c, d, e, f, g, h = struct.unpack(TWO, nodes, at + 64)
    end
    local quarter = a + b + c + d
    if rest >= quarter then
      rest, child = rest - quarter, child + 4
      a, b, c, d = e, f, g, h
    end
    if rest < a then
      weight = a
    elseif rest < a + b then
      rest, child, weight = rest - a, child + 1, b
    elseif rest < a + b + c then
      rest, child, weight = rest - a - b, child + 2, c
    else
      rest, child, weight = rest - a - b - c, child + 3, d
    end
    number = number * FAN + child
    if level > 0 then
      local way = cache[level - 1]
      way.number, way.low, way.high = number, target - rest, target - rest + weight
    end
  end
  return number, weight
end
