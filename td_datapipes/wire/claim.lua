-- Take over an interrupted write, if nobody else has.
--
-- KEYS[1]  the staged hash of one name.
-- ARGV[1]  the write's id, ARGV[2] the note it was found with, ARGV[3] the note of who takes over.
-- Returns  "OK", or "TAKEN" where the note is another one by now; nothing is changed then.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return 'TAKEN'
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 'OK'
