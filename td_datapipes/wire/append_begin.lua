-- Become the one writer that appends to a name, and get a number above those of all earlier ones.
--
-- KEYS[1]  who appends now, KEYS[2] how many began to.
-- ARGV[1]  this writer, ARGV[2] milliseconds until it counts as gone unless it says otherwise.
-- ARGV[3]  the writer that may be replaced though its time is not up, or "".
-- Returns  the number (a greater one where this very call is sent again); or {who appends now, milliseconds left to it} where that is somebody else.
local current = redis.call('GET', KEYS[1])
if current and current ~= ARGV[3] and current ~= ARGV[1] then
  return {current, redis.call('PTTL', KEYS[1])}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return redis.call('INCR', KEYS[2])
