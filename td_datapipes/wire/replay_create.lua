-- Make the state of one ring, unless it is there.
--
-- KEYS[1]  the state.
-- ARGV     field, value, field, value, ...
-- Returns  "OK", or "EXISTS"; nothing is changed then.
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 'EXISTS'
end
redis.call('HSET', KEYS[1], unpack(ARGV))
return 'OK'
