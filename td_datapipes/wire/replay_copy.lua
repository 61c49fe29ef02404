-- Copy a ring onto another name, all of it in one step.
--
-- KEYS     the states of source and target, then pairs: a key of the source, the target's in its place.
-- ARGV[1]  "1": what comes of it can only be read; "0": written too, and indices handed out before are void.
-- Returns  {"OK", cursor, incarnation}; {"GONE"} where there is no source.
local source, target = KEYS[1], KEYS[2]
if redis.call('EXISTS', source) == 0 then
  return {'GONE'}
end
local before = tonumber(redis.call('HGET', target, 'incarnation') or '-1')
redis.call('COPY', source, target, 'REPLACE')
for i = 3, #KEYS, 2 do
  if redis.call('COPY', KEYS[i], KEYS[i + 1], 'REPLACE') == 0 then
    redis.call('DEL', KEYS[i + 1])
  end
end
local incarnation = (math.max(before, tonumber(redis.call('HGET', source, 'incarnation'))) + 1) % 32768
redis.call('HSET', target, 'frozen', ARGV[1], 'former', '', 'incarnation', string.format('%.0f', incarnation))
return {'OK', redis.call('HGET', target, 'cursor'), string.format('%.0f', incarnation)}
