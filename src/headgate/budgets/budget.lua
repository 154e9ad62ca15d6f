-- A budget ledger. One run is one atomic step.
--
-- The arithmetic is that of headgate.core; it is repeated here because a decision and its booking
-- must not be apart. The table of headgate.core.budgets.reservations is put before this text when the
-- script is loaded, as RULES, MOVES and BOOKINGS by "state call", so it is not written twice.
--
-- Everything is read first, then decided on tables in memory, then written by `save`. So a step
-- that fails, for want of memory or on a replica, fails at its first write and has changed nothing.
--
-- KEYS are those named below. ARGV[1] is the step, ARGV[2] its parameters in MessagePack; the reply
-- is MessagePack too (ARGV[3]: see the end). Amounts are integers far below 2^53 and never leave MessagePack, which keeps
-- them exact; numbers that Redis reads as text are written by `format`.
--
-- Most of the time goes into making tables and collecting them. So a reservation and a journal
-- entry are kept as their values in a row, without an array around them, and answers are joined.

local IDENTITY, LIMITS, SCOPES, BALANCES, CHECKPOINT = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local RESERVATIONS, LEASES, FINISHED, JOURNAL = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local KINDS, STEPS_TAKEN = KEYS[10], KEYS[11]

-- Looking up a global costs more inside Redis than most of what is done with it.
local call, pack_one, unpack_one = redis.call, cmsgpack.pack, cmsgpack.unpack
local ipairs, pairs, unpack = ipairs, pairs, unpack
local format, max, min, ceil = string.format, math.max, math.min, math.ceil

-- The fields of a reservation: state, amounts held, end of the lease, whether it was dispatched at
-- once, when it was finished (0 before), its charges, the kind that it counts for ('' for none), the
-- actual amounts. The charges are a text with a line of scope and bucket for each balance: most
-- reservations share few such texts.
local STATE, USD, TOKENS, LEASE, AT_ONCE, FINISHED_AT, CHARGES, KIND = 1, 2, 3, 4, 5, 6, 7, 8
local ACTUAL_USD, ACTUAL_TOKENS = 9, 10

-- The columns of a balance: spent, reserved and overrun in micro-dollars, then in tokens; then what
-- is claimed and not accepted, in both; after them the second by which it last changed.
local COLUMNS = 8
local RESERVED_USD, RESERVED_TOKENS, CHANGED_AT = 2, 5, 9
local ROW_WIDTH = 1 + CHANGED_AT

-- Lua passes at most some thousand arguments to a function.
local MOST_ARGUMENTS = 1000
-- Folding has a cost of its own, so it waits for some entries; and it never takes long at once.
local FEWEST_FOLDED, MOST_FOLDED = 64, 2000
local FEWEST_FORGOTTEN, MOST_FORGOTTEN = 200, 2000

local function write(command, key, values)
  local result
  for first = 1, #values, MOST_ARGUMENTS do
    result = call(command, key, unpack(values, first, min(first + MOST_ARGUMENTS - 1, #values)))
  end
  return result
end

local function read(key, fields)
  if #fields == 0 then return fields end
  if #fields <= MOST_ARGUMENTS then return call('HMGET', key, unpack(fields)) end
  local found = {}
  for first = 1, #fields, MOST_ARGUMENTS do
    local last = min(first + MOST_ARGUMENTS - 1, #fields)
    local slice = call('HMGET', key, unpack(fields, first, last))
    for at = 1, #slice do found[first + at - 1] = slice[at] end
  end
  return found
end

-- A sheet holds balances by scope and bucket: the kept ones, or those of the checkpoint.
local function new_sheet(key)
  return { key = key, rows = {}, changed = {}, unknown = {} }
end

-- Whether a balance of the batch has, or may soon have, a column as large as one may be. What a
-- batch adds is small beside that, so it is enough to look when balances are read.
local NEARLY_FULL = MOST_BALANCE - MOST_HELD
local has_full = false

local function load_rows(sheet, scopes)
  local wanted = {}
  for _, scope in ipairs(scopes) do
    if not sheet.rows[scope] then
      sheet.rows[scope] = {}
      wanted[#wanted + 1] = scope
    end
  end
  for at, packed in ipairs(read(sheet.key, wanted)) do
    local row = sheet.rows[wanted[at]]
    if packed then
      local flat = unpack_one(packed)
      for first = 1, #flat, ROW_WIDTH do
        row[flat[first]] = { unpack(flat, first + 1, first + CHANGED_AT) }
        if max(unpack(flat, first + 1, first + COLUMNS)) >= NEARLY_FULL then has_full = true end
      end
    else
      sheet.unknown[wanted[at]] = true
    end
  end
end

local now = 0

local function add(sheet, scope, bucket, delta)
  local row = sheet.rows[scope]
  local columns = row[bucket]
  if not columns then
    columns = { 0, 0, 0, 0, 0, 0, 0, 0, 0 }
    row[bucket] = columns
  end
  for at = 1, COLUMNS do columns[at] = columns[at] + delta[at] end
  columns[CHANGED_AT] = max(columns[CHANGED_AT], ceil(now))
  sheet.changed[scope] = true
end

local function is_zero(columns)
  for at = 1, COLUMNS do
    if columns[at] ~= 0 then return false end
  end
  return true
end

-- Of a scope in which nothing is left, nothing is kept; returns those scopes.
local function save_rows(sheet)
  local values, gone = {}, {}
  for scope in pairs(sheet.changed) do
    local flat = {}
    for bucket, columns in pairs(sheet.rows[scope]) do
      if not is_zero(columns) then
        flat[#flat + 1] = bucket
        for at = 1, CHANGED_AT do flat[#flat + 1] = columns[at] end
      end
    end
    if #flat > 0 then
      values[#values + 1] = scope
      values[#values + 1] = pack_one(flat)
    else
      gone[#gone + 1] = scope
    end
  end
  write('HSET', sheet.key, values)
  write('HDEL', sheet.key, gone)
  return gone
end

local most = {}        -- bounds: journal, finished, finished_seconds, expired
local live_from = {}   -- the earliest bucket that counts, for each scope of the batch
local used_usd, used_tokens = {}, {}  -- what counts against each limit, for scopes that have one
local unbooked = {}    -- sums by what they weigh on, not yet added to the balances
local balances, checkpoint = new_sheet(BALANCES), new_sheet(CHECKPOINT)
local limits = {}
local reservations, changed = {}, {}
local entries = {}
local live_kinds, changed_kinds = {}, {}  -- live reservations of kinds of which little is known

local pairs_of_text = {}
local function charges_of(text)
  local charges = pairs_of_text[text]
  if not charges then
    charges = {}
    for scope, bucket in string.gmatch(text, '([^ \n]*) (%-?%d+)') do
      charges[#charges + 1] = { scope, tonumber(bucket) }
    end
    pairs_of_text[text] = charges
  end
  return charges
end

-- Texts stand for scopes once, however many reservations have them.
local function scopes_of(texts)
  local scopes = {}
  for text in pairs(texts) do
    for _, charge in ipairs(charges_of(text)) do scopes[#scopes + 1] = charge[1] end
  end
  return scopes
end

local function load_reservations(ids)
  local wanted = {}
  for _, id in ipairs(ids) do
    if reservations[id] == nil then
      reservations[id] = false
      wanted[#wanted + 1] = id
    end
  end
  local texts = {}
  for at, packed in ipairs(read(RESERVATIONS, wanted)) do
    if packed then
      local reservation = { unpack_one(packed) }
      reservations[wanted[at]] = reservation
      texts[reservation[CHARGES]] = true
    end
  end
  load_rows(balances, scopes_of(texts))
end

local function add_all(sheet, sums)
  for text, sum in pairs(sums) do
    for _, charge in ipairs(charges_of(text)) do add(sheet, charge[1], charge[2], sum) end
  end
end

local function add_unbooked()
  add_all(balances, unbooked)
  unbooked = {}
end

local function add_to(sums, text, s1, r1, o1, s2, r2, o2, u1, u2)
  local sum = sums[text]
  if sum then
    sum[1], sum[2], sum[3] = sum[1] + s1, sum[2] + r1, sum[3] + o1
    sum[4], sum[5], sum[6] = sum[4] + s2, sum[5] + r2, sum[6] + o2
    sum[7], sum[8] = sum[7] + u1, sum[8] + u2
  else
    sums[text] = { s1, r1, o1, s2, r2, o2, u1, u2 }
  end
end

local function total_of(scope)
  local total, oldest = { 0, 0, 0, 0, 0, 0, 0, 0 }, nil
  for bucket, columns in pairs(balances.rows[scope]) do
    local usd, tokens = columns[1] + columns[2] + columns[3], columns[4] + columns[5] + columns[6]
    if bucket >= live_from[scope] then
      for at = 1, COLUMNS do total[at] = total[at] + columns[at] end
      local is_used = usd ~= 0 or tokens ~= 0
      if is_used and (not oldest or bucket < oldest) then oldest = bucket end
    end
  end
  return total, oldest
end

local function watch(scope)
  local total = total_of(scope)
  used_usd[scope] = total[1] + total[2] + total[3]
  used_tokens[scope] = total[4] + total[5] + total[6]
end

-- A column that has reached its most grows no more; the journal has what is added.
local function bounded(text, ...)
  add_unbooked()
  local delta = { ... }
  for _, charge in ipairs(charges_of(text)) do
    local columns = balances.rows[charge[1]][charge[2]]
    for at = 1, columns and COLUMNS or 0 do
      if delta[at] > 0 and columns[at] >= MOST_BALANCE then delta[at] = 0 end
    end
  end
  return unpack(delta)
end

local function book(id, text, asked, s1, r1, o1, s2, r2, o2, u1, u2)
  if has_full then
    s1, r1, o1, s2, r2, o2, u1, u2 = bounded(text, s1, r1, o1, s2, r2, o2, u1, u2)
  end
  add_to(unbooked, text, s1, r1, o1, s2, r2, o2, u1, u2)
  local usd, tokens = s1 + r1 + o1, s2 + r2 + o2
  for _, charge in ipairs(charges_of(text)) do
    local scope = charge[1]
    if used_usd[scope] and charge[2] >= live_from[scope] then
      used_usd[scope], used_tokens[scope] = used_usd[scope] + usd, used_tokens[scope] + tokens
    end
  end
  entries[#entries + 1] = pack_one(now, id, asked, text, s1, r1, o1, s2, r2, o2, u1, u2)
end

-- What a reservation weighs in one unit: spent, reserved, overrun.
local WEIGHTS = {
  NOTHING = function() return 0, 0, 0 end,
  RESERVED = function(held) return 0, held, 0 end,
  ASSUMED = function(held) return held, 0, 0 end,
  ACTUAL = function(held, actual) return min(actual, held), 0, max(0, actual - held) end,
  UNHELD = function(_, actual) return 0, 0, actual end,
}
local STATE_BOOKING = {
  held = 'RESERVED', dispatched = 'RESERVED', expired = 'NOTHING', assumed = 'ASSUMED',
}
local IS_LIVE = { held = true, dispatched = true }

-- What is left, in a unit, in the scopes of a tenant that an operator has limited, and which these
-- are; nothing of a window that has passed since the money was held. A limit has a mark if a tenant
-- set it.
local LIMIT_IS_BY_TENANT, LIMIT_COUNTED_SINCE = 4, 5
local function left_to_claim(own, unit)
  local least, limited = nil, {}
  for _, charge in ipairs(charges_of(own)) do
    local scope = charge[1]
    local limit = limits[scope]
    if limit and limit[1 + unit] >= 0 and not limit[LIMIT_IS_BY_TENANT] then
      local used = unit == 1 and used_usd[scope] or used_tokens[scope]
      local left = charge[2] >= live_from[scope] and max(0, limit[1 + unit] - used) or 0
      least = least and min(least, left) or left
      limited[scope] = true
    end
  end
  return least or 0, limited
end

-- A claim has the charges that are the tenant's own, as a text, and whether it is bound to these.
local OWN, IS_BOUND = 1, 2

-- How much of a claim is not accepted yet, in a unit, and in which scopes: in those that are not the
-- tenant's own, or, of one that is bound to nothing, in those that an operator has limited.
local function waiting(text, claim, unit, overrun)
  local least, scopes = left_to_claim(claim[OWN], unit)
  local rest = max(0, overrun - least)
  if rest == 0 then return 0, {} end
  if claim[IS_BOUND] then
    scopes = {}
    for _, charge in ipairs(charges_of(text)) do scopes[charge[1]] = true end
    for _, charge in ipairs(charges_of(claim[OWN])) do scopes[charge[1]] = nil end
  end
  return rest, scopes
end

-- Texts of charges by whether dollars and tokens wait in them: 2 and 1, or 3 for both.
local function parts_of(text, usd_waits, tokens_wait)
  local parts = {}
  for _, charge in ipairs(charges_of(text)) do
    local scope = charge[1]
    local kind = (usd_waits[scope] and 2 or 0) + (tokens_wait[scope] and 1 or 0)
    local line = format('%s %.0f', scope, charge[2])
    parts[kind] = parts[kind] and parts[kind] .. '\n' .. line or line
  end
  return parts
end

local function book_move(id, reservation, asked, after, actual_usd, actual_tokens, claim)
  local before, text = STATE_BOOKING[reservation[STATE]], reservation[CHARGES]
  if before == after then return book(id, text, asked, 0, 0, 0, 0, 0, 0, 0, 0) end
  local usd, tokens = reservation[USD], reservation[TOKENS]
  local s1, r1, o1 = WEIGHTS[before](usd, actual_usd)
  local s2, r2, o2 = WEIGHTS[after](usd, actual_usd)
  local s3, r3, o3 = WEIGHTS[before](tokens, actual_tokens)
  local s4, r4, o4 = WEIGHTS[after](tokens, actual_tokens)
  s1, r1, o1, s2, r2, o2 = s2 - s1, r2 - r1, o2 - o1, s4 - s3, r4 - r3, o4 - o3
  if not claim or (o1 <= 0 and o2 <= 0) then
    return book(id, text, asked, s1, r1, o1, s2, r2, o2, 0, 0)
  end
  local usd_waiting, usd_waits = waiting(text, claim, 1, o1)
  local tokens_waiting, tokens_wait = waiting(text, claim, 2, o2)
  for kind, part in pairs(parts_of(text, usd_waits, tokens_wait)) do
    local u1, u2 = kind >= 2 and usd_waiting or 0, kind % 2 == 1 and tokens_waiting or 0
    book(id, part, asked, s1, r1, o1 - u1, s2, r2, o2 - u2, u1, u2)
  end
end

-- An answer is an array in MessagePack: a byte for its length, then its tag and its values.
local function answer(tag, ...)
  return string.char(0x91 + select('#', ...)) .. pack_one(tag, ...)
end
local MADE, AGAIN, UNKNOWN = answer('made'), answer('again'), answer('unknown')

local function load_kinds(kinds)
  for at, live in ipairs(read(KINDS, kinds)) do live_kinds[kinds[at]] = tonumber(live or 0) end
end

local function count_kind(kind, amount)
  if not kind or kind == '' then return end
  if not live_kinds[kind] then load_kinds({ kind }) end
  live_kinds[kind] = max(0, live_kinds[kind] + amount)
  changed_kinds[kind] = true
end

local function settle(id, asked, actual_usd, actual_tokens, lease_until, claim)
  local reservation = reservations[id]
  if not reservation then return UNKNOWN end
  local key = reservation[STATE] .. ' ' .. asked
  local rule = RULES[key]
  if rule == 'STAY' then
    reservation[LEASE] = max(reservation[LEASE], lease_until)
  elseif rule == 'MOVE' then
    book_move(id, reservation, asked, BOOKINGS[key], actual_usd or 0, actual_tokens or 0, claim)
    if IS_LIVE[reservation[STATE]] and not IS_LIVE[MOVES[key]] then
      count_kind(reservation[KIND], -1)
    end
    reservation[STATE] = MOVES[key]
    reservation[ACTUAL_USD], reservation[ACTUAL_TOKENS] = actual_usd, actual_tokens
  else
    local is_same = asked ~= 'commit'
      or (reservation[ACTUAL_USD] == actual_usd and reservation[ACTUAL_TOKENS] == actual_tokens)
    local is_refused = rule == 'REFUSE' or not is_same
    return answer(is_refused and 'illegal' or 'known', unpack(reservation))
  end
  changed[id] = reservation
  return answer('known', unpack(reservation))
end

local function expire_due()
  local due = call(
    'ZRANGEBYSCORE', LEASES, '-inf', format('%.17g', now), 'LIMIT', 0, most.expired
  )
  load_reservations(due)
  for _, id in ipairs(due) do
    local reservation = reservations[id]
    if reservation and IS_LIVE[reservation[STATE]] and reservation[LEASE] <= now then
      settle(id, 'expire')
    else
      -- Never written so, but one such lease would be due for ever.
      call('ZREM', LEASES, id)
    end
  end
  return #due
end

-- The fields of a flexible request: how firm each amount is, the most that work of its kind has
-- cost, the kind, how many of it may be live at once where the unit is limited, and what half of
-- such work has cost.
-- Dollars come before tokens.
local USD_RULE, TOKENS_RULE, MOST_USD, FLEXIBLE_KIND, USD_AT_ONCE, LIKELY_USD = 1, 2, 3, 5, 6, 8

local function asks_for_the_same(reservation, wanted, usd, tokens, at_once, flexible)
  local charges = charges_of(reservation[CHARGES])
  local is_usd_exact = not flexible or flexible[USD_RULE] == 'exact'
  local is_tokens_exact = not flexible or flexible[TOKENS_RULE] == 'exact'
  if (is_usd_exact and reservation[USD] ~= usd)
    or (is_tokens_exact and reservation[TOKENS] ~= tokens)
    or reservation[AT_ONCE] ~= at_once or #charges ~= #wanted then
    return false
  end
  for at, charge in ipairs(charges) do
    if charge[1] ~= wanted[at][1] then return false end
  end
  return true
end

-- -1 stands for no limit in a unit.
local NO_LIMIT = { 'none', -1, -1, false }

-- The first scope without a limit that would hold more than can be counted, and its refusal.
local function overfull(charges, usd, tokens)
  add_unbooked()
  for _, charge in ipairs(charges) do
    local scope = charge[1]
    local limit = limits[scope] or NO_LIMIT
    local total, oldest = total_of(scope)
    if (limit[2] < 0 and total[RESERVED_USD] + usd > MOST_BALANCE)
      or (limit[3] < 0 and total[RESERVED_TOKENS] + tokens > MOST_BALANCE) then
      return answer('refused', scope, limit[1], limit[2], limit[3], total, oldest, 0)
    end
  end
end

local function refusal(charges, usd, tokens)
  for _, charge in ipairs(charges) do
    local scope = charge[1]
    local limit = limits[scope]
    if limit then
      local is_over_usd = limit[2] >= 0 and used_usd[scope] + usd > limit[2]
      local is_over_tokens = limit[3] >= 0 and used_tokens[scope] + tokens > limit[3]
      if is_over_usd or is_over_tokens then
        add_unbooked()
        local total, oldest = total_of(scope)
        return answer('refused', scope, limit[1], limit[2], limit[3], total, oldest, 0)
      end
    end
  end
end

-- What one scope with a limit lets a request hold in a unit; nil where it has no room.
local function hold_in(limit, used, reserved, rule, asked, most_seen, likely)
  local left = limit - used
  if rule == 'exact' then return asked <= left and asked or nil end
  local least = max(1, ceil(limit / LEAST_SHARE))
  if rule == 'probe' then
    if left < max(least, asked) then return nil end
    return max(asked, min(ceil(limit / PROBE_SHARE), left, MOST_HELD))
  end
  local guard = min(most_seen, ceil(limit / GUARD_SHARE))
  if left >= (reserved == 0 and max(asked, guard) or asked + 2 * guard) then return asked end
  local has_room
  if most_seen <= limit then
    has_room = left >= max(least, most_seen)
  else
    has_room = reserved == 0 and left >= max(least, likely)
  end
  return has_room and min(asked, left) or nil
end

-- The amounts that a flexible request holds and the kind that it counts for, or its refusal.
local function flexible_amounts(charges, usd, tokens, flexible)
  add_unbooked()
  local asked = { usd, tokens }
  local most, tightest, kind = {}, {}, ''
  for _, charge in ipairs(charges) do
    local scope = charge[1]
    local limit = limits[scope]
    if limit then
      local total, oldest = total_of(scope)
      for unit = 1, 2 do
        local bound, first = limit[1 + unit], 3 * unit - 2
        if bound >= 0 then
          local used = total[first] + total[first + 1] + total[first + 2]
          local held = hold_in(
            bound, used, total[first + 1], flexible[unit], asked[unit],
            flexible[MOST_USD + unit - 1], flexible[LIKELY_USD + unit - 1]
          )
          if not held then
            return nil, answer('refused', scope, limit[1], limit[2], limit[3], total, oldest, 0)
          end
          if not most[unit] or held < most[unit] then most[unit], tightest[unit] = held, scope end
          if flexible[USD_AT_ONCE + unit - 1] > 0 then kind = flexible[FLEXIBLE_KIND] end
        end
      end
    end
  end
  if kind ~= '' then
    if not live_kinds[kind] then load_kinds({ kind }) end
    for unit = 1, 2 do
      local scope, at_once, live = tightest[unit], flexible[USD_AT_ONCE + unit - 1], live_kinds[kind]
      if scope and at_once > 0 and live >= at_once then
        local limit, total, oldest = limits[scope], total_of(scope)
        return nil, answer('refused', scope, limit[1], limit[2], limit[3], total, oldest, live)
      end
    end
  end
  for unit = 1, 2 do most[unit] = most[unit] or asked[unit] end
  return { most[1], most[2], kind }
end

local function reserve(id, usd, tokens, lease_until, at_once, text, flexible, has_more_due)
  local charges = charges_of(text)
  local known = reservations[id]
  if known then
    local is_same = asks_for_the_same(known, charges, usd, tokens, at_once, flexible)
    return answer(is_same and 'known' or 'illegal', unpack(known))
  end
  local refused, kind = has_full and overfull(charges, usd, tokens) or nil, ''
  if refused then
    return has_more_due and AGAIN or refused
  elseif flexible then
    local amounts
    amounts, refused = flexible_amounts(charges, usd, tokens, flexible)
    if amounts then usd, tokens, kind = unpack(amounts) end
  else
    refused = refusal(charges, usd, tokens)
  end
  -- Leases that are due may hold the room that is missing.
  if refused then return has_more_due and AGAIN or refused end
  local state = at_once and 'dispatched' or 'held'
  local reservation = { state, usd, tokens, lease_until, at_once, 0, text, kind }
  reservations[id], changed[id] = reservation, reservation
  count_kind(kind, 1)
  book(id, text, 'reserve', 0, usd, 0, 0, tokens, 0, 0, 0)
  -- Who left the amounts to the ledger is told of them.
  return flexible and answer('known', unpack(reservation)) or MADE
end

-- What an operator does to the buckets of a scope that count: take from what is booked, the newest
-- first, or from what is claimed, the oldest first. `false` is all that is claimed. Returns what it
-- adds to each bucket, by column; or nil, the unit and what there is.
local SPENT, OVERRUN, UNACCEPTED = { 1, 4 }, { 3, 6 }, { 7, 8 }

local function adjusted(scope, current, asked, amounts)
  local buckets, changes = {}, {}
  for bucket in pairs(balances.rows[scope]) do
    if bucket >= live_from[scope] then buckets[#buckets + 1] = bucket end
  end
  local is_adjust = asked == 'adjust'
  table.sort(buckets, function(one, other)
    if is_adjust then return one > other end
    return one < other
  end)
  local function change(bucket, column, amount)
    changes[bucket] = changes[bucket] or { 0, 0, 0, 0, 0, 0, 0, 0 }
    changes[bucket][column] = changes[bucket][column] + amount
  end
  for unit = 1, 2 do
    local wanted, columns = amounts[unit], { UNACCEPTED[unit] }
    if is_adjust then
      wanted, columns = -wanted, { OVERRUN[unit], SPENT[unit] }
      if wanted < 0 then
        change(current, SPENT[unit], -wanted)
        wanted = 0
      end
    end
    local missing = wanted or math.huge
    for _, bucket in ipairs(buckets) do
      for _, column in ipairs(columns) do
        local taken = min(missing, max(0, balances.rows[scope][bucket][column]))
        if taken > 0 then
          change(bucket, column, -taken)
          missing = missing - taken
          if asked == 'accept' then change(bucket, OVERRUN[unit], taken) end
        end
      end
    end
    if wanted and missing > 0 then return nil, unit, wanted - missing end
  end
  return changes
end

local function adjust(id, asked, usd, tokens, text)
  local charge, known = charges_of(text)[1], reservations[id]
  if known then
    local is_same = known[KIND] == asked and charges_of(known[CHARGES])[1][1] == charge[1]
      and (not usd or known[ACTUAL_USD] == usd) and (not tokens or known[ACTUAL_TOKENS] == tokens)
    return answer(is_same and 'known' or 'illegal', unpack(known))
  end
  add_unbooked()
  local changes, unit, there = adjusted(charge[1], charge[2], asked, { usd, tokens })
  if not changes then return answer('short', unit, there) end
  local texts, totals = {}, { 0, 0 }
  for bucket, deltas in pairs(changes) do
    local part = format('%s %.0f', charge[1], bucket)
    texts[#texts + 1] = part
    totals[1], totals[2] = totals[1] - deltas[UNACCEPTED[1]], totals[2] - deltas[UNACCEPTED[2]]
    book(id, part, asked, unpack(deltas))
  end
  -- What changed nothing is journalled too, and found by its id.
  if #texts == 0 then book(id, text, asked, 0, 0, 0, 0, 0, 0, 0, 0) end
  local made = #texts > 0 and table.concat(texts, '\n') or text
  local reservation = { 'committed', 0, 0, now, false, 0, made, asked,
    usd or totals[1], tokens or totals[2] }
  reservations[id], changed[id] = reservation, reservation
  return answer('known', unpack(reservation))
end

-- A request takes so many fields: call, id, dollars, tokens, end of lease, dispatched, charges, and
-- what the ledger may work out by itself, or false; of a claim its own charges and its bounds.
local REQUEST_WIDTH = 8
local IS_ADJUSTMENT = { adjust = true, accept = true, reject = true }

local function apply_all(requests, texts, has_more_due)
  local answers = {}
  for first = 1, #requests, REQUEST_WIDTH do
    local asked, id, usd, tokens, lease_until, at_once, place, flexible =
      unpack(requests, first, first + REQUEST_WIDTH - 1)
    if asked == 'reserve' then
      local text = texts[place]
      answers[#answers + 1] =
        reserve(id, usd, tokens, lease_until, at_once, text, flexible, has_more_due)
    elseif asked == 'commit' then
      answers[#answers + 1] = settle(id, asked, usd, tokens, nil, flexible)
    elseif IS_ADJUSTMENT[asked] then
      answers[#answers + 1] = adjust(id, asked, usd, tokens, texts[place])
    else
      answers[#answers + 1] = settle(id, asked, nil, nil, lease_until)
    end
  end
  return answers
end

-- What a reservation is corrected by must meet what it was booked as. So a bucket is final only
-- when nothing in it is held and all that was finished since its last change is forgotten.
local function is_final(columns)
  if columns[RESERVED_USD] ~= 0 or columns[RESERVED_TOKENS] ~= 0 then return false end
  local oldest = call('LINDEX', FINISHED, 0)
  return not oldest or columns[CHANGED_AT] < unpack_one(oldest)
end

-- The bucket of a scope that has as many later ones as are kept whatever the clock says; nil if no
-- bucket has.
local function last_beyond_kept(scope)
  local buckets = {}
  for bucket in pairs(balances.rows[scope]) do buckets[#buckets + 1] = bucket end
  if #buckets <= KEPT_BUCKETS then return nil end
  table.sort(buckets)
  return buckets[#buckets - KEPT_BUCKETS]
end

-- Buckets that left their window more than a day ago go from both sides of the audit at once.
-- Bucket 0 is that of no window, and counts again whenever a scope has none.
local function purge_old_buckets()
  for scope, earliest in pairs(live_from) do
    local last = balances.changed[scope] and last_beyond_kept(scope)
    if last then
      local left_before = min(earliest - most.finished_seconds, last + 1)
      for bucket, columns in pairs(balances.rows[scope]) do
        if bucket > 0 and bucket < left_before and is_final(columns) then
          local negated = {}
          for at = 1, COLUMNS do negated[at] = -columns[at] end
          load_rows(checkpoint, { scope })
          add(checkpoint, scope, bucket, negated)
          balances.rows[scope][bucket] = nil
        end
      end
    end
  end
end

local function fold_journal(length)
  local count = min(length - most.journal, MOST_FOLDED)
  if count < FEWEST_FOLDED then return end
  local sums = {}
  for _, packed in ipairs(call('LRANGE', JOURNAL, 0, count - 1)) do
    local _, _, _, text, s1, r1, o1, s2, r2, o2, u1, u2 = unpack_one(packed)
    add_to(sums, text, s1, r1, o1, s2, r2, o2, u1, u2)
  end
  load_rows(checkpoint, scopes_of(sums))
  add_all(checkpoint, sums)
  call('LTRIM', JOURNAL, count, -1)
end

local function forget_finished()
  local excess = call('LLEN', FINISHED) - most.finished
  local oldest = excess <= 0 and call('LINDEX', FINISHED, 0)
  local is_any_old = oldest and unpack_one(oldest) < now - most.finished_seconds
  if excess <= 0 and not is_any_old then return end
  local count = min(max(excess, is_any_old and FEWEST_FORGOTTEN or 0), MOST_FORGOTTEN)
  local finished_at, ids = {}, {}
  for at, packed in ipairs(call('LRANGE', FINISHED, 0, count - 1)) do
    local when, id = unpack_one(packed)
    if at > excess and when >= now - most.finished_seconds then break end
    finished_at[at], ids[at] = when, id
  end
  local gone = {}
  for at, packed in ipairs(read(RESERVATIONS, ids)) do
    -- One that was finished again, by a late commit, stands in the list a second time.
    local when = packed and select(FINISHED_AT, unpack_one(packed))
    if when == finished_at[at] then gone[#gone + 1] = ids[at] end
  end
  write('HDEL', RESERVATIONS, gone)
  call('LTRIM', FINISHED, #ids, -1)
end

local function save_reservations()
  local values, leases, ended, finished, texts = {}, {}, {}, {}, {}
  for id, reservation in pairs(changed) do
    if IS_LIVE[reservation[STATE]] then
      local lease = reservation[LEASE]
      texts[lease] = texts[lease] or format('%.17g', lease)
      leases[#leases + 1] = texts[lease]
      leases[#leases + 1] = id
    else
      reservation[FINISHED_AT] = now
      ended[#ended + 1] = id
      finished[#finished + 1] = pack_one(now, id)
    end
    values[#values + 1] = id
    values[#values + 1] = pack_one(unpack(reservation))
  end
  write('HSET', RESERVATIONS, values)
  write('ZADD', LEASES, leases)
  write('ZREM', LEASES, ended)
  write('RPUSH', FINISHED, finished)
end

local function save_kinds()
  local values, gone = {}, {}
  for kind in pairs(changed_kinds) do
    if live_kinds[kind] > 0 then
      values[#values + 1] = kind
      values[#values + 1] = format('%.0f', live_kinds[kind])
    else
      gone[#gone + 1] = kind
    end
  end
  write('HSET', KINDS, values)
  write('HDEL', KINDS, gone)
end

local function save()
  save_reservations()
  save_kinds()
  add_unbooked()
  purge_old_buckets()
  local gone, is_gone, scopes = save_rows(balances), {}, {}
  for _, scope in ipairs(gone) do is_gone[scope] = true end
  for scope in pairs(balances.unknown) do
    if balances.changed[scope] and not is_gone[scope] then
      scopes[#scopes + 1] = '0'
      scopes[#scopes + 1] = scope
    end
  end
  write('ZADD', SCOPES, scopes)
  local unlisted = {}
  for at, limit in ipairs(read(LIMITS, gone)) do
    if not limit then unlisted[#unlisted + 1] = gone[at] end
  end
  write('ZREM', SCOPES, unlisted)
  local length = write('RPUSH', JOURNAL, entries)
  if length then fold_journal(length) end
  save_rows(checkpoint)
  forget_finished()
end

local function stale_windows(batch_scopes)
  local stale = {}
  for _, sent in ipairs(batch_scopes) do
    local scope, window = sent[1], sent[2]
    local kept = limits[scope] and limits[scope][1] or 'none'
    if kept ~= window then stale[#stale + 1] = { scope, kept } end
  end
  return stale
end

local function apply(parameters)
  local batch_scopes, texts, requests = parameters[4], parameters[5], parameters[6]
  now = parameters[2]
  most.journal, most.finished, most.finished_seconds, most.expired = unpack(parameters[3])
  local names, ids = {}, {}
  for at, sent in ipairs(batch_scopes) do
    names[at] = sent[1]
    live_from[sent[1]] = sent[3]
  end
  for at, packed in ipairs(read(LIMITS, names)) do
    limits[names[at]] = packed and unpack_one(packed)
  end
  local stale = stale_windows(batch_scopes)
  if #stale > 0 then return answer('stale', stale) end
  load_rows(balances, names)
  for first = 2, #requests, REQUEST_WIDTH do ids[#ids + 1] = requests[first] end
  load_reservations(ids)
  for scope, limit in pairs(limits) do
    if limit then watch(scope) end
  end
  local expired = expire_due()
  local has_more_due = expired >= most.expired
  local answers = apply_all(requests, texts, has_more_due)
  save()
  local head = '\148' .. pack_one('done', expired, has_more_due)
  return head .. struct.pack('>BI2', 0xdc, #answers) .. table.concat(answers)
end

-- A change of window: what the journal knows moves into the buckets of the new one, which begin at
-- `starts`. Returns what is to be written, so that everything has been read before the first write.
local function change_window(scope, starts)
  local first, current = starts[1], starts[#starts]
  local function bucket_at(at)
    if at < first then return false end
    local found = first
    for _, start in ipairs(starts) do
      if start > at then break end
      found = start
    end
    return found
  end
  local old_buckets = {}
  local function bucket_in(text)
    local found = old_buckets[text]
    if found == nil then
      found = false
      for _, charge in ipairs(charges_of(text)) do
        if charge[1] == scope then found = charge[2] end
      end
      old_buckets[text] = found
    end
    return found
  end
  local function charged_at(text, bucket)
    local lines = {}
    for at, charge in ipairs(charges_of(text)) do
      lines[at] = format('%s %.0f', charge[1], charge[1] == scope and bucket or charge[2])
    end
    return table.concat(lines, '\n')
  end
  local function move(sheet, from, to, delta)
    local negated = {}
    for at = 1, COLUMNS do negated[at] = -delta[at] end
    add(sheet, scope, from, negated)
    add(sheet, scope, to, delta)
  end
  load_rows(balances, { scope })
  load_rows(checkpoint, { scope })
  local journal = call('LRANGE', JOURNAL, 0, -1)
  local journal_from = journal[1] and unpack_one(journal[1]) or now
  local moved, corrections, is_moved = {}, {}, false
  local function move_entry(at, entry, to)
    local text = entry[4]
    local from = bucket_in(text)
    if not to or to == from then return end
    local delta = { unpack(entry, 5, 4 + COLUMNS) }
    move(balances, from, to, delta)
    journal[at] = pack_one(entry[1], entry[2], entry[3], charged_at(text, to), unpack(delta))
    is_moved = true
  end
  for at, packed in ipairs(journal) do
    local entry = { unpack_one(packed) }
    if bucket_in(entry[4]) then
      local id, asked = entry[2], entry[3]
      if IS_ADJUSTMENT[asked] then
        corrections[#corrections + 1] = { at, entry }
      else
        if asked == 'reserve' then moved[id] = bucket_at(entry[1]) end
        move_entry(at, entry, moved[id])
      end
    end
  end
  for _, correction in ipairs(corrections) do
    local at, entry = unpack(correction)
    local to = bucket_at(entry[1])
    local columns, is_whole = to and balances.rows[scope][to], true
    for column = 1, COLUMNS do
      if (columns and columns[column] or 0) + entry[4 + column] < 0 then is_whole = false end
    end
    if is_whole then move_entry(at, entry, to) end
  end
  local ids, is_live = {}, {}
  for id in pairs(moved) do ids[#ids + 1] = id end
  for _, id in ipairs(call('ZRANGE', LEASES, 0, -1)) do
    is_live[id] = true
    if moved[id] == nil then ids[#ids + 1] = id end
  end
  local kept = {}
  for at, packed in ipairs(read(RESERVATIONS, ids)) do
    local id, reservation = ids[at], packed and { unpack_one(packed) }
    local from = reservation and bucket_in(reservation[CHARGES])
    local is_forgotten = moved[id] == nil and is_live[id]
    local to = is_forgotten and current or moved[id]
    if from and to and to ~= from then
      if is_forgotten then
        local held = { 0, reservation[USD], 0, 0, reservation[TOKENS], 0, 0, 0 }
        move(balances, from, to, held)
        move(checkpoint, from, to, held)
      end
      reservation[CHARGES] = charged_at(reservation[CHARGES], to)
      kept[#kept + 1] = id
      kept[#kept + 1] = pack_one(unpack(reservation))
    end
  end
  return is_moved and journal or nil, kept, journal_from
end

-- Whether a bucket from before a time has amounts whose time the journal does not know.
local function has_folded(scope, before)
  for bucket, columns in pairs(checkpoint.rows[scope]) do
    local usd, tokens = columns[1] + columns[2] + columns[3], columns[4] + columns[5] + columns[6]
    if bucket < before and (usd ~= 0 or tokens ~= 0) then return true end
  end
  return false
end

-- The parameters after the scope: the limit, or nil for none; the time; the buckets that count now.
-- Replies with the window before, from when on everything counts (0 for the whole window), and what
-- was folded of the scope. The script cannot compute when a bucket ended, so it takes all that was
-- folded for a part of the new window, and `count_whole_window` says if it was none.
local function set_limit(parameters)
  local scope, limit, starts = parameters[2], parameters[3], parameters[5]
  now = parameters[4]
  local packed = call('HGET', LIMITS, scope)
  local before = packed and unpack_one(packed)[1] or 'none'
  if not limit then
    call('HDEL', LIMITS, scope)
    if call('HEXISTS', BALANCES, scope) == 0 then call('ZREM', SCOPES, scope) end
    return answer('set', before, 0, {})
  end
  local is_changed, since, journal, kept, journal_from = limit[1] ~= before, 0, nil, {}, 0
  if is_changed then
    journal, kept, journal_from = change_window(scope, starts)
    if journal_from > starts[1] and has_folded(scope, starts[1]) then since = journal_from end
  elseif packed then
    since = unpack_one(packed)[LIMIT_COUNTED_SINCE] or 0
  end
  limit[LIMIT_COUNTED_SINCE] = since
  call('HSET', LIMITS, scope, pack_one(limit))
  call('ZADD', SCOPES, '0', scope)
  local folded = {}
  if is_changed then
    write('HSET', RESERVATIONS, kept)
    save_rows(balances)
    save_rows(checkpoint)
    if journal then
      call('DEL', JOURNAL)
      write('RPUSH', JOURNAL, journal)
    end
    for bucket, columns in pairs(checkpoint.rows[scope]) do
      folded[#folded + 1] = bucket
      for at = 1, CHANGED_AT do folded[#folded + 1] = columns[at] end
    end
  end
  return answer('set', before, since, folded)
end

-- The parameters after the scope: the limit as it was set, with the time since when it counts.
-- It counts its whole window from now on, unless somebody has set another one meanwhile.
local function count_whole_window(parameters)
  local scope, limit = parameters[2], parameters[3]
  local kept = call('HGET', LIMITS, scope)
  if kept and kept == pack_one(limit) then
    limit[LIMIT_COUNTED_SINCE] = 0
    kept = pack_one(limit)
    call('HSET', LIMITS, scope, kept)
  end
  return '\146' .. pack_one('limit') .. (kept or '\192')
end

-- Replies as `set_limit` if there was none, or else with the limit that is in force, or nil.
local function create_limit(parameters)
  local kept = call('HGET', LIMITS, parameters[2])
  if parameters[3] and not kept then return set_limit(parameters) end
  return '\146' .. pack_one('limit') .. (kept or '\192')
end

-- The values are MessagePack already, so they are joined and not packed again.
local function accounts(parameters)
  local scope, most_scopes = parameters[2], parameters[3]
  local first, last = '-', '+'
  if scope ~= '' then first, last = '[' .. scope .. '/', '(' .. scope .. '0' end
  local scopes = call('ZRANGEBYLEX', SCOPES, first, last, 'LIMIT', 0, most_scopes)
  if scopes[1] ~= scope then table.insert(scopes, 1, scope) end
  local kept_limits, kept_balances = read(LIMITS, scopes), read(BALANCES, scopes)
  local parts = { '\146' .. pack_one('accounts') .. struct.pack('>BI4', 0xdd, #scopes) }
  for at, name in ipairs(scopes) do
    parts[#parts + 1] = '\147' .. pack_one(name)
    parts[#parts + 1] = kept_limits[at] or '\192'
    parts[#parts + 1] = kept_balances[at] or '\144'
  end
  return table.concat(parts)
end

local STEPS = {
  apply = apply,
  set_limit = set_limit,
  create_limit = create_limit,
  count_whole_window = count_whole_window,
  accounts = accounts,
}
local parameters = unpack_one(ARGV[2])
local is_lost = call('GET', IDENTITY) ~= parameters[1]

-- A server that no other one replaces is told no more. Where a replica may be promoted, ARGV[3] is
-- how many steps the caller knows to be on all of them, and the reply says how many there are now.
-- Each step counts, also one that changes nothing else: then there is always something that
-- replicas can confirm, and with it all that was written before.
local known_steps = tonumber(ARGV[3])
if not known_steps then
  return is_lost and answer('lost') or STEPS[ARGV[1]](parameters)
end
if is_lost then return { answer('lost'), 0 } end
if tonumber(call('GET', STEPS_TAKEN) or 0) < known_steps then return { answer('behind'), 0 } end
return { STEPS[ARGV[1]](parameters), call('INCR', STEPS_TAKEN) }
