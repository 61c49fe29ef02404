-- Go on being the one writer that appends, unless somebody else has begun to since.
--
-- KEYS[1]  who appends now, KEYS[2] how many began to.
-- ARGV[1]  this writer, ARGV[2] milliseconds until it counts as gone, ARGV[3] its number.
-- Returns  "OK", or "FENCED".
if redis.call('GET', KEYS[2]) ~= ARGV[3] then
  return 'FENCED'
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 'OK'
