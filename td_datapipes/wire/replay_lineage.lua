-- Which rows an index may name after another server has taken over, included by other scripts. A replica that becomes a
-- master, and a server that restarts, may lack rows that were confirmed, and gives their write numbers to other rows. It
-- has a replication id of its own, by which the first write notices: the incarnation changes then, and `former` keeps
-- "incarnation cursor;" of each time, the latest last: rows up to that cursor are those that the former one names, too.

-- The server's replication id; "" where it cannot be asked for.
local function lineage_id()
  local info = redis.pcall('INFO', 'replication')
  return type(info) == 'string' and info:match('master_replid:(%x+)') or ''
end

-- The next incarnation, another one on each server that takes over.
local function lineage_next(incarnation, id)
  return string.format('%.0f', (tonumber(incarnation) + 2 + tonumber(id:sub(1, 6), 16) % 1022) % 32768)
end

-- The last row that an incarnation's indices still name; 0 where there is none.
local function lineage_last(named, cursor, incarnation, former)
  if named == incarnation then
    return cursor
  end
  local entries, last = {}, cursor
  for its, at in former:gmatch('(%d+) (%d+);') do
    entries[#entries + 1] = {its, tonumber(at)}
  end
  for i = #entries, 1, -1 do
    last = math.min(last, entries[i][2])
    if entries[i][1] == named then
      return last
    end
  end
  return 0
end
