"""The Lua scripts of RedisStore; each is one atomic step of the server.

A state is a hash with the fields `generation`, `entry` (JSON), `ttl` (ms), `chunks` and, if there
are no chunks, `value`. Its lock is a string with the lock's token. All keys of a state have the
same hash tag, and so have the two indexes of an owner, so that a cluster has them on one node.

Scripts that may run although the server's memory is full say so (`allow-oom`): states can then be
read, locked and removed, though not written. The flags need Redis 7 or Valkey.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple


class Call(NamedTuple):
    """One call of a script."""

    script: Script
    keys: list[str]
    arguments: list[Any]

    @property
    def by_hash(self) -> tuple[Any, ...]:
        """The arguments of EVALSHA."""
        return self.script.hash, len(self.keys), *self.keys, *self.arguments

    @property
    def whole(self) -> tuple[Any, ...]:
        """The arguments of EVAL, for a server that has not met the script yet."""
        return self.script.text, len(self.keys), *self.keys, *self.arguments


class Script:
    """A script and its hash, by which a server knows it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.hash = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def call(self, keys: list[str], arguments: list[Any]) -> Call:
        """Return a call with these keys and arguments."""
        return Call(self, keys, arguments)


# KEYS: state, lock. ARGV: known generation, token or "", lease in ms.
# Returns {1, rest of the other lock's lease} or {0, generation, chunks, value, ttl}; chunks is -1
# if the generation is known.
OPEN = Script("""#!lua flags=allow-oom
if ARGV[2] ~= '' then
  local held = redis.call('GET', KEYS[2])
  if held and held ~= ARGV[2] then
    return {1, redis.call('PTTL', KEYS[2])}
  end
  redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
end
local found = redis.call('HMGET', KEYS[1], 'generation', 'ttl', 'chunks')
if not found[1] then
  return {0, '', 0, '', 0}
end
local rest = tonumber(found[2])
if ARGV[2] ~= '' then  -- it must not expire before its holder has written the next version
  rest = math.max(rest, tonumber(ARGV[3]))
end
redis.call('PEXPIRE', KEYS[1], rest)
for i = 1, tonumber(found[3]) do
  redis.call('PEXPIRE', KEYS[1] .. ':' .. found[1] .. ':' .. i, rest)
end
if found[1] == ARGV[1] then
  return {0, found[1], -1, '', found[2]}
end
local value = redis.call('HGET', KEYS[1], 'value') or ''
return {0, found[1], tonumber(found[3]), value, found[2]}
""")

# KEYS: state, lock. ARGV: 1 to restart its lifetime. Returns {generation, entry, ttl, rest of it};
# without such a state {}, or {0} if its lock is held, so that one may be written soon.
DESCRIBE = Script("""#!lua flags=allow-oom
local found = redis.call('HMGET', KEYS[1], 'generation', 'entry', 'ttl', 'chunks')
if not found[1] then
  return redis.call('EXISTS', KEYS[2]) == 1 and {0} or {}
end
if ARGV[1] == '1' then
  redis.call('PEXPIRE', KEYS[1], found[3])
  for i = 1, tonumber(found[4]) do
    redis.call('PEXPIRE', KEYS[1] .. ':' .. found[1] .. ':' .. i, found[3])
  end
end
return {found[1], found[2], found[3], redis.call('PTTL', KEYS[1])}
""")

# KEYS: state, lock. ARGV: token, base generation, new generation, ttl in ms, entry, chunks, value.
# Returns 1 if the state has the new generation, 0 if the lock or the base is lost.
WRITE = Script("""#!lua
local held = redis.call('GET', KEYS[2])
local found = redis.call('HMGET', KEYS[1], 'generation', 'chunks')
local generation = found[1] or ''
if generation ~= ARGV[3] then
  if (held and held ~= ARGV[1]) or generation ~= ARGV[2] then
    return 0
  end
  for i = 1, tonumber(found[2] or 0) do
    redis.call('UNLINK', KEYS[1] .. ':' .. generation .. ':' .. i)
  end
  redis.call('HSET', KEYS[1], 'generation', ARGV[3], 'ttl', ARGV[4], 'entry', ARGV[5],
    'chunks', ARGV[6])
  if ARGV[6] == '0' then
    redis.call('HSET', KEYS[1], 'value', ARGV[7])
  else
    redis.call('HDEL', KEYS[1], 'value')
  end
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
  for i = 1, tonumber(ARGV[6]) do
    redis.call('PEXPIRE', KEYS[1] .. ':' .. ARGV[3] .. ':' .. i, ARGV[4])
  end
end
if held == ARGV[1] then
  redis.call('DEL', KEYS[2])
end
return 1
""")

# KEYS: state, lock. ARGV: token, base generation. Returns 1, or 0 if the lock or the base is lost.
REMOVE = Script("""#!lua flags=allow-oom
local held = redis.call('GET', KEYS[2])
local found = redis.call('HMGET', KEYS[1], 'generation', 'chunks')
if (held and held ~= ARGV[1]) or (found[1] and found[1] ~= ARGV[2]) then
  return 0
end
for i = 1, tonumber(found[2] or 0) do
  redis.call('UNLINK', KEYS[1] .. ':' .. found[1] .. ':' .. i)
end
redis.call('UNLINK', KEYS[1], KEYS[2])
return 1
""")

# KEYS: state, lock. ARGV: token. Returns the state's ttl, 0 if there is no such state, or -1 if
# another lock is held.
UNLOCK = Script("""#!lua flags=allow-oom
local held = redis.call('GET', KEYS[2])
if held and held ~= ARGV[1] then
  return -1
end
redis.call('DEL', KEYS[2])
local ttl = tonumber(redis.call('HGET', KEYS[1], 'ttl') or 0)
if held and ttl > 0 then
  redis.call('PEXPIRE', KEYS[1], ttl)
end
return ttl
""")

# KEYS: state, lock. ARGV: token, lease in ms. A lock that is gone is not taken again: its holder
# may have given it back while this was under way. A state lives at least as long as its lock.
RENEW = Script("""#!lua flags=allow-oom
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return 0
end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
local found = redis.call('HMGET', KEYS[1], 'generation', 'ttl', 'chunks')
if found[1] then
  local rest = math.max(tonumber(found[2]), tonumber(ARGV[2]))
  redis.call('PEXPIRE', KEYS[1], rest)
  for i = 1, tonumber(found[3]) do
    redis.call('PEXPIRE', KEYS[1] .. ':' .. found[1] .. ':' .. i, rest)
  end
end
return 1
""")

# The indexes of an owner: its ids in order, and the same ids by the time at which they expire.
# KEYS: ids, expiry. ARGV: id, when it expires (ms since the epoch), the present time, the most ids
# ("": no limit). Returns 1, or 0 if the id would be one too many.
ADMIT = Script("""#!lua flags=allow-oom
if ARGV[4] ~= '' and not redis.call('ZSCORE', KEYS[2], ARGV[1]) then
  local over = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[3], 'LIMIT', 0, 1000)
  for _, id in ipairs(over) do
    redis.call('ZREM', KEYS[1], id)
    redis.call('ZREM', KEYS[2], id)
  end
  if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[4]) then
    return 0
  end
end
redis.call('ZADD', KEYS[1], 0, ARGV[1])
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
for i = 1, 2 do
  redis.call('PEXPIREAT', KEYS[i], ARGV[2], 'NX')
  redis.call('PEXPIREAT', KEYS[i], ARGV[2], 'GT')
end
return 1
""")
