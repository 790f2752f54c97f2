"""Words and phrases that may stand for each other in a question, as data.

In `EQUAL`, each line holds phrases that replace one another. In `ONE_WAY`, the phrases on the right
may replace the left one, but not the other way round ("gets" has many meanings). No line holds a
digit, and none changes which operation a question means. A phrase ends at a word's end, before the
punctuation there; entries that end with "?" are for the last words of a question.
"""

from __future__ import annotations

EQUAL = """
in total = altogether = in all = overall = all together = all in all
in the end = at the end = finally = when all is done
each day = every day = per day
each week = every week = per week
each month = every month = per month
each hour = every hour = per hour
each minute = every minute = per minute
each night = every night = per night
each year = every year = per year
each morning = every morning
for each hour = for every hour
on each hour = on every hour
for each day = for every day
on each day = on every day
for each week = for every week
on each week = on every week
for each month = for every month
on each month = on every month
for each year = for every year
on each year = on every year
gives away = hands out = donates
gave away = handed out = donated
give away = hand out = donate
giving away = handing out = donating
throws away = throws out = gets rid of = discards = tosses out
threw away = threw out = got rid of = discarded = tossed out
throw away = throw out = get rid of = discard = toss out
throwing away = throwing out = getting rid of = discarding
collects = gathers
collected = gathered
collect = gather
receives = is given
starts with = begins with
started with = began with
start with = begin with
finds = discovers = comes across
found = discovered = came across
needs = requires
contains = holds
contained = held
contain = hold
eats = consumes = gobbles up = munches
ate = consumed = gobbled up = munched
eaten = consumed
breaks = smashes = shatters
shop = store
shops = stores
mother = mum = mom
father = dad
grandmother = grandma = granny
grandfather = grandpa = granddad
kids = children
kid = child
friend = pal = buddy
friends = pals = buddies
candies = sweets
cookies = biscuits
film = movie
films = movies
pupils = students
pupil = student
shares = splits = divides up
sharing = splitting = dividing
equally = evenly = in equal parts = fairly
cash = money
neighbor = neighbour
neighbors = neighbours
meters = metres
kilometers = kilometres = km
liters = litres
centimeters = centimetres = cm
favorite = favourite
colored = coloured
gray = grey
parking lot = car park
vacation = holiday
trip = journey
pile = heap = stack
bag = sack
bags = sacks
big = large
small = little
does not = doesn't
do not = don't
did not = didn't
is not = isn't
are not = aren't
was not = wasn't
were not = weren't
has not = hasn't
have not = haven't
cannot = can't
what is = what's
there is = there's
that is = that's
it is = it's
they are = they're
she is = she's
he is = he's
i am = i'm
you are = you're
we are = we're
twice as many = two times as many = double as many
twice as much = two times as much
twice the = two times the = double the
three times as many = thrice as many
a dozen = one dozen = twelve
half of the = half the = one half of the
left? = left over? = remaining? = still left?
are left? = remain? = are left over? = are remaining? = are still there?
is left? = remains? = is left over? = is remaining?
later on = some time later
together? = in total? = altogether? = in all? = combined?
now? = at this point? = at the moment? = by now? = now, after all this?
how much money = how many dollars
nobody = no one
everyone = everybody
every one = each one
each of them = every one of them
the rest = the others = the remaining ones
at first = initially = in the beginning = to begin with = originally
some more = a few more
a few = several = a handful of
one by one = one after another
"""

ONE_WAY = """
in every > in each
half a dozen > half a dozen
autumn > fall
earns > makes, is paid
earned > made, was paid
as well > too
then > after that, next, afterwards, later
also > additionally
are left > remain, are left over, are remaining
arrive > come, show up
arrived > came, showed up
received > got, was given
was given > received, got
share > split, divide
shared > split, divided
carton > box
some > a number of, several, a few
buys > purchases, picks up, gets, acquires
bought > purchased, picked up, got, acquired
buy > purchase, pick up, get
buying > purchasing, picking up, getting
purchases > buys, gets
purchased > bought, got
picks up > buys, collects
sells > finds buyers for
hands > gives, passes
handed > gave, passed
sends > mails, posts
sent > mailed, posted
loses > misplaces
mislays > loses
puts > places, lays
walks > strolls, hikes
walked > strolled, hiked
drives > travels
drove > travelled
jogs > runs
jogged > ran
bakes > makes, prepares
baked > made, prepared
knits > makes
draws > sketches
drew > sketched
harvests > picks, gathers
harvested > picked, gathered
owns > has
owned > had
possesses > has, owns
fills > loads
costs > is priced at, sells for, goes for, comes to
pays > hands over
paid > handed over, spent
spends > pays out, uses up
spent > paid out, used up
departs > leaves
requires > needs
holds > can hold, has room for, takes
hold > can hold, have room for, take
pals > friends
sweets > candy pieces
boys and girls > children
youngsters > children
each. > apiece., a piece., per piece.
each, > apiece,
per person > for each person, a head
per box > in each box, a box
fewer > less
at the start > at first
currently > now, at the moment
now has > currently has
yesterday > the day before
the following day > the next day
the next day > the day after, the following day, a day later
this morning > early today
in the morning > before noon
after lunch > in the afternoon
in the evening > at night
last week > the week before
at home > in the house
at school > in class
exactly > precisely
just > only
calculate > work out, find, compute
work out > calculate, find, figure out
tell me > say, please tell me
altogether? > in all?, in total?, all together?, if you add everything up?
in total? > in all?, altogether?, when everything is counted?, counting everything?
in all? > in total?, altogether?
so far > up to now, until now
left over > remaining
"""


def _equal() -> dict[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {}
    for line in filter(None, EQUAL.split("\n")):
        phrases = [phrase.strip() for phrase in line.split("=")]
        for phrase in phrases:
            others = tuple(other for other in phrases if other != phrase)
            table[phrase] = (*table.get(phrase, ()), *others)
    return table


def _one_way() -> dict[str, tuple[str, ...]]:
    table = _equal()
    for line in filter(None, ONE_WAY.split("\n")):
        phrase, _, others = line.partition(">")
        # Commas separate the phrases, but "each," ends with one.
        names = [other.strip() for other in others.split(", ") if other.strip()]
        table[phrase.strip()] = (*table.get(phrase.strip(), ()), *names)
    return table


TABLE = _one_way()
