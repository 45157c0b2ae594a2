-- One turn of one replica at the store: all that it tells, and all that it is told. See _messages.py.
--
-- What a replica tells is how things stand, never a change: that it has so much, wants so much, was charged so
-- much since it joined. So a turn that is made twice, or whose answer was lost, changes nothing the second time.
-- Grants are numbered, and are told again until their number comes back.
local stamp = redis.call('TIME')
local now = stamp[1] * 1000 + math.floor(stamp[2] / 1000)

local turn = cjson.decode(ARGV[1])
local me, root = turn.replica, KEYS[1] .. ':'
local LIVE, EPOCHS, SEQS = root .. 'live', root .. 'epochs', root .. 'seqs'
local CAPS, USED, EXPECT = root .. 'caps', root .. 'used', root .. 'expect'
local SERVICE, SETTLED, LEFT = root .. 'service', root .. 'settled', root .. 'left'
local RATES, MARKS = root .. 'rates', root .. 'marks'
local NEWS, NUMBERS, UNTIL = root .. 'news', root .. 'numbers', root .. 'until'

local function of(what, replica) return root .. what .. ':' .. replica end

local function pairs_of(key)
  local flat, found = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end

local function number_of(key, field) return tonumber(redis.call('HGET', key, field) or 0) end

-- A clock that is set back must not let live what was to end: time here goes on from where it was.
local CLOCK = root .. 'clock'
local seen = number_of(CLOCK, 'seen')
now = now + number_of(CLOCK, 'ahead')
if now < seen then
  redis.call('HSET', CLOCK, 'ahead', number_of(CLOCK, 'ahead') + seen - now)
  now = seen
end
redis.call('HSET', CLOCK, 'seen', now)

local function use(resource, more)
  if more ~= 0 and redis.call('HINCRBY', USED, resource, more) <= 0 then redis.call('HDEL', USED, resource) end
end

local function forget(replica, told_too)
  for resource, count in pairs(pairs_of(of('held', replica))) do use(resource, -tonumber(count)) end
  for _, what in ipairs({'held', 'grants', 'wants'}) do redis.call('DEL', of(what, replica)) end
  if told_too then redis.call('DEL', of('told', replica)) end
  redis.call('ZREM', LIVE, replica)
  redis.call('HDEL', EPOCHS, replica)
  redis.call('HDEL', SEQS, replica)
end

for _, replica in ipairs(redis.call('ZRANGEBYSCORE', LIVE, '-inf', now)) do forget(replica, true) end

-- Who is it, and is this its newest turn?
local epoch, seq = number_of(EPOCHS, me), number_of(SEQS, me)
if turn.epoch ~= 0 and turn.epoch ~= epoch then return cjson.encode({state = 'fenced'}) end
if turn.seq <= seq then return cjson.encode({state = 'late'}) end
if turn.leave then
  if epoch ~= 0 then forget(me, true) end
  epoch = 0
elseif turn.epoch == 0 then
  if epoch ~= 0 then forget(me, false) end  -- the answer to its first turn was lost: it was charged already
  epoch = redis.call('INCR', root .. 'epoch')
  redis.call('HSET', EPOCHS, me, epoch)
  redis.call('SETNX', root .. 'born', now)
  if redis.call('ZCARD', LIVE) == 0 then
    redis.call('SET', root .. 'first', now)
    redis.call('DEL', EXPECT)
  end
end
if not turn.leave then
  redis.call('HSET', SEQS, me, turn.seq)
  redis.call('ZADD', LIVE, now + turn.lease, me)
end

-- A store that has just begun, or stood still for so long that all are forgotten, may not know yet what runs: until
-- all had time to say so, each has its share only.
local settling = now < tonumber(redis.call('GET', root .. 'first') or 0) + turn.lease
local expect = settling and math.max(number_of(EXPECT, 'replicas'), turn.known) or 1
if settling then redis.call('HSET', EXPECT, 'replicas', expect) end

-- What it has.
for resource, cap in pairs(turn.caps) do redis.call('HSET', CAPS, resource, cap) end
local held, grants, wants = of('held', me), of('grants', me), of('wants', me)
local open = {}
for number, grant in pairs(pairs_of(grants)) do
  if tonumber(number) <= turn.ack then
    redis.call('HDEL', grants, number)
  else
    grant = cjson.decode(grant)
    for resource, count in pairs(grant.takes) do open[resource] = (open[resource] or 0) + count end
  end
end
if turn.whole then
  for resource, _ in pairs(pairs_of(held)) do
    if not turn.have[resource] then turn.have[resource] = 0 end
  end
  for key, _ in pairs(pairs_of(wants)) do
    if not turn.want[key] then turn.want[key] = {count = 0} end
  end
end
if not turn.leave then
  for resource, count in pairs(turn.have) do
    local left = count + (open[resource] or 0)
    use(resource, left - number_of(held, resource))
    if left > 0 then redis.call('HSET', held, resource, left) else redis.call('HDEL', held, resource) end
  end
end

-- What it was charged, since it joined, by group and tenant: "group\ntenant".
local told = of('told', me)
local function add(key, field, more) redis.call('HSET', key, field, number_of(key, field) + more) end
local function since_told(field, total)
  local more = total - number_of(told, field)
  redis.call('HSET', told, field, total)
  return more
end
if not turn.leave then
  for field, total in pairs(turn.served) do add(SERVICE, field, since_told('s' .. field, total)) end
  for field, total in pairs(turn.settled) do add(SETTLED, field, since_told('t' .. field, total)) end
end

-- What it has used of rates. A bucket is the moment at which it will be full again.
local rates = {}
for field, rate in pairs(turn.rates) do
  local full = number_of(RATES, field)
  if not turn.leave then
    local more = since_told('r' .. field, rate.used)
    if more > 0 then full = math.max(full, now) end
    full = full + more * 60000 / rate.size
    if full > now then redis.call('HSET', RATES, field, full) else redis.call('HDEL', RATES, field) end
  end
  rates[field] = math.max(full - now, 0)
end

-- What operators said: the last word counts. What has to be said once, is not said anew.
for field, value in pairs(turn.marks) do
  if string.sub(field, 1, 5) == 'once:' then redis.call('HSETNX', MARKS, field, value)
  elseif value == '' then redis.call('HDEL', MARKS, field) else redis.call('HSET', MARKS, field, value) end
  redis.call('INCR', root .. 'version')
end
local version = tonumber(redis.call('GET', root .. 'version') or 0)

-- What it saw, and others may believe for a while.
for _, key in ipairs(redis.call('ZRANGEBYSCORE', UNTIL, '-inf', now)) do
  redis.call('HDEL', NEWS, key)
  redis.call('ZREM', NUMBERS, key)
  redis.call('ZREM', UNTIL, key)
end
for key, told in pairs(turn.news) do
  local known = redis.call('HGET', NEWS, key)
  if told.left > 0 and not (known and cjson.decode(known).rank > told.rank) then
    redis.call('HSET', NEWS, key, cjson.encode({value = told.value, rank = told.rank, by = me}))
    redis.call('ZADD', NUMBERS, redis.call('INCR', root .. 'seen'), key)
    redis.call('ZADD', UNTIL, now + told.left, key)
  end
end
local news = {}
for _, key in ipairs(redis.call('ZRANGEBYSCORE', NUMBERS, '(' .. turn.seen, '+inf')) do
  local known = cjson.decode(redis.call('HGET', NEWS, key))
  if known.by ~= me then
    local left = redis.call('ZSCORE', UNTIL, key) - now
    news[key] = {value = known.value, rank = known.rank, left = left}
  end
end

-- What it wants. A tenant that comes is lifted to the least of those that wait, or to the last one that left; by
-- what they were really served, since estimates are given back.
local replicas = redis.call('ZRANGE', LIVE, 0, -1)
local waiting = {}
for _, replica in ipairs(replicas) do
  for key, want in pairs(pairs_of(of('wants', replica))) do
    waiting[#waiting + 1] = {replica = replica, key = key, want = cjson.decode(want)}
  end
end
local function field_of(want) return want.group .. '\n' .. want.tenant end
local function lift(want)
  local least
  for _, other in ipairs(waiting) do
    if other.want.group == want.group then
      if other.want.tenant == want.tenant then return end
      local settled = number_of(SETTLED, field_of(other.want))
      if not least or settled < least then least = settled end
    end
  end
  local more = (least or number_of(LEFT, want.group)) - number_of(SETTLED, field_of(want))
  if more > 0 then
    add(SETTLED, field_of(want), more)
    add(SERVICE, field_of(want), more)
  end
end
local keys = {}
for key, _ in pairs(turn.want) do keys[#keys + 1] = key end
table.sort(keys)
for _, key in ipairs(keys) do
  local want, at = turn.want[key], nil
  for i, other in ipairs(waiting) do
    if other.replica == me and other.key == key then at = i end
  end
  if want.count == 0 then
    redis.call('HDEL', wants, key)
    if at then
      local gone = table.remove(waiting, at).want
      redis.call('HSET', LEFT, gone.group, number_of(SETTLED, field_of(gone)))
    end
  elseif not turn.leave then
    if at then waiting[at].want = want
    else
      lift(want)
      waiting[#waiting + 1] = {replica = me, key = key, want = want}
    end
    redis.call('HSET', wants, key, cjson.encode(want))
  end
end

-- Grants: the best tier first, in it the tenant that was served least; equals by the name of their replica.
local caps, used = pairs_of(CAPS), pairs_of(USED)
local function lacks(replica, resource, count)
  local cap = caps[resource]
  if not cap or tonumber(used[resource] or 0) + count > tonumber(cap) then return true end
  if expect == 1 then return false end
  return number_of(of('held', replica), resource) + count > math.floor(tonumber(cap) / expect)
end
-- What is full stays so in this turn: each list is walked once, for all who wait for it.
local lists = {}
local function first_of(replica, rest, slots)
  local whose = expect > 1 and replica .. '\n' .. slots or slots
  lists[whose] = lists[whose] or {}
  local list = lists[whose][rest]
  if not list then
    list = {at = 1}
    for name in string.gmatch(rest, '[^\n]+') do list[#list + 1] = name end
    lists[whose][rest] = list
  end
  while list[list.at] and lacks(replica, list[list.at], slots) do list.at = list.at + 1 end
  return list[list.at]
end
local function place_of(waiter)
  local replica, want = waiter.replica, waiter.want
  for _, resource in ipairs(want.also) do if lacks(replica, resource, 1) then return end end
  for _, resource in ipairs(want.wide) do if lacks(replica, resource, want.slots) then return end end
  for _, worker in ipairs(want.any) do if not lacks(replica, worker, want.slots) then return worker end end
  return first_of(replica, want.rest, want.slots)
end
local function takes_of(want, worker)
  local takes = {[worker] = want.slots}
  for _, resource in ipairs(want.also) do takes[resource] = 1 end
  for _, resource in ipairs(want.wide) do takes[resource] = want.slots end
  return takes
end
local service = {}  -- by group and tenant, of those who could be placed
local function served(waiter)
  local field = field_of(waiter.want)
  service[field] = service[field] or number_of(SERVICE, field)
  return service[field]
end
local function comes_before(one, other)
  if one.want.tier ~= other.want.tier then return one.want.tier < other.want.tier end
  if served(one) ~= served(other) then return served(one) < served(other) end
  if one.given ~= other.given then return one.given < other.given end
  if one.replica ~= other.replica then return one.replica < other.replica end
  return one.key < other.key
end
local given = {}  -- by replica and line: those that it was told of and did not acknowledge
for _, replica in ipairs(replicas) do
  given[replica] = {}
  for _, grant in pairs(pairs_of(of('grants', replica))) do
    local key = cjson.decode(grant).want
    given[replica][key] = (given[replica][key] or 0) + 1
  end
end
for _, waiter in ipairs(waiting) do
  waiter.given, waiter.left = 0, waiter.want.count - (given[waiter.replica][waiter.key] or 0)
end
while true do
  local best, worker
  for _, waiter in ipairs(waiting) do
    local found = waiter.left > 0 and place_of(waiter)
    if found and (not best or comes_before(waiter, best)) then best, worker = waiter, found end
  end
  if not best then break end
  local number, takes = redis.call('INCR', root .. 'grant'), takes_of(best.want, worker)
  local grant = {want = best.key, worker = worker, takes = takes, cost = best.want.cost}
  redis.call('HSET', of('grants', best.replica), number, cjson.encode(grant))
  for resource, count in pairs(takes) do
    redis.call('HINCRBY', of('held', best.replica), resource, count)
    use(resource, count)
    used[resource] = tonumber(used[resource] or 0) + count
  end
  -- It is charged what such a request usually costs at once; its replica tells the difference.
  service[field_of(best.want)] = served(best) + best.want.cost
  add(SERVICE, field_of(best.want), best.want.cost)
  best.left, best.given = best.left - 1, best.given + 1
end

local contended = false
for _, waiter in ipairs(waiting) do contended = contended or waiter.left > 0 end
local told_grants = {}
for number, grant in pairs(pairs_of(grants)) do
  told_grants[#told_grants + 1] = {number = tonumber(number), grant = cjson.decode(grant)}
end
local reply = {
  state = 'joined', epoch = epoch, live = #replicas, grants = told_grants, rates = rates,
  settling = settling, version = version, contended = contended, born = redis.call('GET', root .. 'born') or '',
}
reply.members, reply.news, reply.seen = replicas, news, tonumber(redis.call('GET', root .. 'seen') or 0)
if version ~= turn.version then reply.marks = pairs_of(MARKS) end
return cjson.encode(reply)
