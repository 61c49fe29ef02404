-- Forget all rows of a ring. Indices handed out before are void.
--
-- KEYS[1]  the ring's state, then its other keys.
-- Returns  {"OK"}; {"GONE"}; {"FROZEN"}.
local frozen = redis.call('HGET', KEYS[1], 'frozen')
if not frozen then
  return {'GONE'}
end
if frozen == '1' then
  return {'FROZEN'}
end
for i = 2, #KEYS do
  redis.call('UNLINK', KEYS[i])
end
local incarnation = (tonumber(redis.call('HGET', KEYS[1], 'incarnation')) + 1) % 32768
redis.call('HSET', KEYS[1], 'cursor', 0, 'samples', 0, 'fifo', 0, 'max_priority', 1, 'former', '',
  'incarnation', string.format('%.0f', incarnation))
return {'OK'}
