-- Store rows behind the last one of a ring, over its oldest, and move its cursor: all of it or nothing.
--
-- Records come as an argument, or, where they are long, staged: each chunk's whole in a string of its own, set just
-- before. Such a string takes the chunk's place if the rows come to lie as its writer expected, without being copied.
--
-- KEYS[1]  the ring's state, KEYS[2] what this writer's latest calls were answered: ";number cursor incarnation;...".
-- KEYS[3]  and on: the staged strings, as many as ARGV[9] says; in one slot with the others. They are gone afterwards.
-- ARGV[1]  what the ring's other keys begin with; they lie in the same slot.
-- ARGV[2]  the number of this call, counted by its writer: a repeated call is answered, not carried out.
-- ARGV[3]  number of rows, at most the ring's capacity.
-- ARGV[4]  their records, "" where they are staged; the first 8 bytes of each become its write number, or are it
--          already, see ARGV[8].
-- ARGV[5]  seconds for which the answer is kept.
-- ARGV[6]  the slot that the caller expects the first row in, or "": {"MOVED", cursor} where it is another.
-- ARGV[7]  "1": nothing is done unless this writer's call before this one was carried out: {"AFTER"}.
-- ARGV[8]  the cursor that the write numbers in the records follow from, or "": they are put in here where it is not so.
-- ARGV[9]  number of staged strings; each holds as many records as a chunk, and is as long.
-- ARGV[10] where the ring joins rows, 32 bytes a row: step, reward, 1 where done + 2 where terminated (little-endian
--          doubles), and the trajectory's id.
-- Returns  {"OK", cursor before, incarnation}; {"GONE"}; {"FROZEN"}; {"WAIT", rows written, samples drawn};
--          {"UNSTAGED"} where a staged string is not there, or no longer.
--include replay_tree
--include replay_lineage
local state = redis.call('HMGET', KEYS[1], 'cursor', 'incarnation', 'capacity', 'records_per_chunk', 'stride_bytes',
  'chunk_bytes', 'stripes', 'stripe', 'frozen', 'levels', 'max_priority', 'samples', 'samples_per_insert', 'min_size',
  'max_diff', 'joined', 'server', 'former')
local num_staged = tonumber(ARGV[9])
-- What a call answers that stores nothing.
local function answer(...)
  for i = 1, num_staged do
    redis.call('UNLINK', KEYS[2 + i])
  end
  return {...}
end
if not state[1] then
  return answer('GONE')
end
local answered = redis.call('GET', KEYS[2]) or ';'
local latest = tonumber(answered:match(';(%d+) %d+ %d+;$') or '0')
if latest >= tonumber(ARGV[2]) then
  local cursor, incarnation = answered:match(';' .. ARGV[2] .. ' (%d+) (%d+);')
  if cursor then
    return answer('OK', cursor, incarnation)
  end
  return answer('AFTER')
end
if ARGV[7] == '1' and latest ~= tonumber(ARGV[2]) - 1 then
  return answer('AFTER')
end
if state[9] == '1' then
  return answer('FROZEN')
end
local prefix, count, records = ARGV[1], tonumber(ARGV[3]), ARGV[4]
local cursor, capacity, per_chunk = tonumber(state[1]), tonumber(state[3]), tonumber(state[4])
local stride, chunk_bytes = tonumber(state[5]), tonumber(state[6])
if ARGV[6] ~= '' and cursor % capacity ~= tonumber(ARGV[6]) then
  return answer('MOVED', state[1])
end
if state[13] ~= '' then
  local diff = (cursor + count) * tonumber(state[13]) - tonumber(state[12])
  if math.min(cursor, capacity) + count > tonumber(state[14]) and diff > tonumber(state[15]) then
    return answer('WAIT', state[1], state[12])
  end
end
for i = 1, num_staged do
  if redis.call('STRLEN', KEYS[2 + i]) ~= chunk_bytes then
    return answer('UNSTAGED')
  end
end

-- Another server than the one that wrote last: from here on it may give numbers to rows that name others elsewhere.
local server = lineage_id()
if server ~= '' and state[17] ~= server then
  if state[17] and state[17] ~= '' then
    local former = (state[18] or '') .. state[2] .. ' ' .. state[1] .. ';'
    if #former > 600 then
      former = former:sub(former:find(';', -400, true) + 1)
    end
    state[2] = lineage_next(state[2], server)
    redis.call('HSET', KEYS[1], 'incarnation', state[2], 'former', former)
  end
  redis.call('HSET', KEYS[1], 'server', server)
end

-- Runs of adjacent slots: {first slot, number of rows, rows before it}. Cut at chunk ends and where the ring ends.
local runs, done = {}, 0
while done < count do
  local slot = (cursor + done) % capacity
  local number = math.min(count - done, per_chunk - slot % per_chunk, capacity - slot)
  runs[#runs + 1] = {slot, number, done}
  done = done + number
end
local function chunk_of(slot)
  local chunk = math.floor(slot / per_chunk) * tonumber(state[7]) + tonumber(state[8])
  return prefix .. '0:' .. string.format('%08x', chunk)
end
-- Looked at before the first write, so that a key of another type stops the call while nothing is changed.
local lengths = {}
for i, run in ipairs(runs) do
  lengths[i] = redis.call('STRLEN', chunk_of(run[1]))
end
-- The records of rows that are no whole chunk, or not where their writer expected them.
local function records_of(before, number)
  if num_staged == 0 then
    return number == count and records or records:sub(before * stride + 1, (before + number) * stride)
  end
  local parts = {}
  while number > 0 do
    local within = before % per_chunk
    local rows = math.min(number, per_chunk - within)
    local staged = KEYS[3 + math.floor(before / per_chunk)]
    parts[#parts + 1] = redis.call('GETRANGE', staged, within * stride, (within + rows) * stride - 1)
    before, number = before + rows, number - rows
  end
  return table.concat(parts)
end
for i, run in ipairs(runs) do
  local slot, number, before = run[1], run[2], run[3]
  local chunk, at = chunk_of(slot), (slot % per_chunk) * stride
  if num_staged > 0 and number == per_chunk and before % per_chunk == 0 then
    local staged = KEYS[3 + before / per_chunk]
    redis.call('PERSIST', staged)
    redis.call('RENAME', staged, chunk)
  else
    if lengths[i] < chunk_bytes then
      redis.call('SETRANGE', chunk, chunk_bytes - 1, '\0')
    end
    redis.call('SETRANGE', chunk, at, records_of(before, number))
  end
  if state[1] ~= ARGV[8] then
    for row = 0, number - 1 do
      redis.call('SETRANGE', chunk, at + row * stride, struct.pack('<i8', cursor + before + row + 1))
    end
  end
end

-- Links from each row to the one that follows it in its trajectory. 32 bytes a slot: the successor's write number
-- (0: none yet), reward, 1 where done + 2 where terminated, and the trajectory's id.
if state[16] == '1' then
  local links, ends = prefix .. 'links', prefix .. 'ends'
  local joins, latest, successor, fresh = ARGV[10], {}, {}, {}
  -- Trajectories whose last row is overwritten are forgotten.
  for _, run in ipairs(runs) do
    if cursor + run[3] >= capacity then
      local old = redis.call('GETRANGE', links, run[1] * 32, (run[1] + run[2]) * 32 - 1)
      for row = 0, run[2] - 1 do
        local id = old:sub(row * 32 + 25, row * 32 + 32)
        local found = redis.call('HGET', ends, id)
        if found and struct.unpack('<d', found) == cursor + run[3] + row + 1 - capacity then
          redis.call('HDEL', ends, id)
        end
      end
    end
  end
  for row = 1, count do
    local at = (row - 1) * 32 + 1
    local id, step = joins:sub(at + 24, at + 31), struct.unpack('<d', joins, at)
    local number = cursor + row
    local last = latest[id]
    if not last then
      local found = redis.call('HGET', ends, id)
      if found then
        local its_number, its_step = struct.unpack('<dd', found)
        last = {its_number, its_step}
      end
      fresh[#fresh + 1] = id
    end
    if last and step == last[2] + 1 then
      if last[1] > cursor then
        successor[last[1] - cursor] = number
      elseif last[1] > cursor + count - capacity then
        redis.call('SETRANGE', links, ((last[1] - 1) % capacity) * 32, struct.pack('<d', number))
      end
    end
    latest[id] = {number, step}
  end
  for _, run in ipairs(runs) do
    local entries = {}
    for i = 1, run[2] do
      local row = run[3] + i
      entries[i] = struct.pack('<d', successor[row] or 0) .. joins:sub(row * 32 - 23, row * 32)
    end
    redis.call('SETRANGE', links, run[1] * 32, table.concat(entries))
  end
  for _, id in ipairs(fresh) do
    redis.call('HSET', ends, id, struct.pack('<dd', latest[id][1], latest[id][2]))
  end
end

-- New rows get the highest priority there has been, so that each is drawn before long.
if state[10] ~= '0' then
  local nodes, one = {}, struct.pack('<d', tonumber(state[11]))
  for _, run in ipairs(runs) do
    redis.call('SETRANGE', prefix .. 'p0', run[1] * 8, string.rep(one, run[2]))
    local low, high = math.floor(run[1] / FAN), math.floor((run[1] + run[2] - 1) / FAN)
    nodes[#nodes + 1] = {low, high - low + 1}
  end
  tree_refresh(prefix, tonumber(state[10]), nodes)
end

for i = 1, num_staged do
  redis.call('UNLINK', KEYS[2 + i])  -- those that were copied
end
local moved = string.format('%.0f', cursor + count)
redis.call('HSET', KEYS[1], 'cursor', moved)
-- More of them than are ever sent together.
if #answered > 1000 then
  answered = answered:sub(answered:find(';', -600, true), -1)
end
redis.call('SET', KEYS[2], answered .. ARGV[2] .. ' ' .. state[1] .. ' ' .. state[2] .. ';', 'EX', ARGV[5])
return {'OK', state[1], state[2]}
