"""Words: nouns and adjectives, and what is composed of them without repeats, by number."""

from __future__ import annotations

import math


def split_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = split_words(
    """
    anchor apple apron arch arrow attic badge bakery balcony bamboo banjo banner barley barn barrel basin basket bay beach
    bead beam bear bell bench berry bicycle birch blanket blossom boat bonnet book boot border bottle bowl box branch brass
    bread breeze brick bridge brook broom brush bucket buckle bundle bush button cabin cable cactus camel camera canal candle
    canoe canyon cape caravan cargo carpet castle cave cedar cellar chain chair chalk chapel cheese chest chimney cider
    circus clay cliff cloak clock cloud clover coast coat cobble coin comet compass copper coral cork corn cottage cotton
    cradle crane crater creek crown crystal cup curtain cushion dagger daisy dawn deer desert desk diamond dock dome donkey
    door dove dragon drum duck dune eagle echo elbow ember engine falcon farm feather fence fern ferry fiddle field finch
    fire flag flame flint flock flour flower flute forest forge fork fossil fountain fox frost fruit furnace galaxy garden
    garlic gate ginger glacier glass globe glove goat gold goose grain granite grape grass gravel grove guitar gull hammer
    harbor harp harvest hat hawk hazel heron hill hinge honey hood hook horn horse hut ice ink inn iron island ivory ivy
    jacket jade jar jewel journal jungle kayak kettle key kite kitten knot ladder lagoon lake lamb lamp lantern lark lava
    leaf leather ledge lemon lens letter library lichen lily linen lion lobster lock locket log loom lotus lute magnet mango
    map maple marble market marsh mask mast meadow melon mill mint mirror mist moon moss moth mountain mug museum needle nest
    net nickel oak oar oasis oat ocean olive onion orange orchard organ otter oven owl oyster paddle palace palm panda paper
    parrot path peach pearl pebble pencil pepper piano pigeon pillow pine pipe planet plank plate plum pocket pond pony
    poppy porch port pottery prairie prism pumpkin quail quarry quill quilt rabbit raft rail rain raven reed reef ribbon
    rice ridge ring river road robin rocket roof root rope rose ruby saddle sail salmon salt sand satchel scarf school scroll
    seal seed shadow sheep shelf shell shield ship shore shovel silk silver sky sled smoke snail snow soap spade sparrow
    spear spice spider spoon spring spruce squirrel stable stage star station steam stone storm stove straw stream sugar
    summit swan table tailor teapot temple tent thistle thorn thread throne thunder ticket tiger timber tower trail train
    tray tree trumpet tulip tunnel turtle umbrella valley vase velvet village vine violet violin volcano wagon wall walnut
    water wave weasel whale wheat wheel whistle willow wind window wing winter wolf wood wool yard zebra
    """
)
ADJECTIVES = split_words(
    """
    able absent active adult agile alert amber ample ancient angry antique arctic autumn awake bare basic bitter bland blank
    bleak blind blue blunt bold bouncy brave brief bright brisk broad broken bronze brown bumpy busy calm careful central
    cheap cheery chief chilly civil clean clear clever close cloudy clumsy coarse cold common cool cosy costly crisp crooked
    cruel curious curly daily damp dark dear decent deep dense dim distant dizzy double drowsy dry dull dusty eager early
    earnest easy eastern elder empty equal even exact faint fair faithful familiar famous fancy fast fearless feeble fierce
    final fine firm flat fluffy foggy fond foreign formal fragile frank free fresh friendly frozen full funny gentle genuine
    giant glad gloomy glossy golden good graceful grand grateful great green grey gruff handy happy hardy harsh hasty
    healthy heavy hidden hollow honest huge humble hungry icy idle inner jolly joyful keen kind large lasting late lazy lean
    level light likely little lively local lonely long loose loud lovely loyal lucky mad major mellow merry mighty mild
    minor misty modern modest muddy narrow native neat nervous new nimble noble noisy northern odd old open outer pale
    patient peaceful plain playful pleasant polite poor precise pretty prime private proud pure purple quaint quick quiet
    rapid rare ready recent red regal remote rich rigid ripe rough round royal rural rusty sacred safe salty sandy scarce
    secret senior serene shallow sharp shiny short shy silent simple sleepy slender slim slow small smart smooth sober soft
    solid sombre sour southern spare stable stark steady steep stern stiff strange strict strong sturdy subtle sudden sunny
    sweet swift tall tame tart tender thick thin thirsty tidy tight tiny tired tough tranquil true urban useful usual vague
    vast vivid warm wary weary western wet white wide wild windy wise witty young
    """
)

NUM_KEYS = len(ADJECTIVES) * len(NOUNS)
"""Distinct results of `key`."""
NUM_COMPOUNDS = len(NOUNS) * (len(NOUNS) - 1)
"""Distinct results of `compound`."""


def key(number: int) -> str:
    """`adjective-noun`, another one for every number in 0..NUM_KEYS - 1."""
    return f"{ADJECTIVES[number // len(NOUNS)]}-{NOUNS[number % len(NOUNS)]}"


def compound(number: int) -> str:
    """One word of two nouns, another pair for every number in 0..NUM_COMPOUNDS - 1."""
    first, rest = divmod(number, len(NOUNS) - 1)
    return NOUNS[first] + NOUNS[rest if rest < first else rest + 1]


def stride(size: int, wish: int) -> int:
    """The smallest number >= `wish` without a common divisor with `size`.

    `(start + i * stride) % size` then meets every number below `size` once, and its first n members are the same for any n.
    """
    step = max(1, wish % size)
    while math.gcd(step, size) != 1:
        step += 1
    return step
