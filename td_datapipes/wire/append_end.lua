-- Stop being the writer that appends, if it still is this one.
--
-- KEYS[1]  who appends now.
-- ARGV[1]  this writer.
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
return 'OK'
