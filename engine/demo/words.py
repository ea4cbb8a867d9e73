"""The closed word lists of the demo corpus. The tokenizer spends its few tokens on them."""

import string


def _words(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


COLORS = _words("red blue green yellow black white brown pink purple gray gold silver")

ANIMALS = _words(
    """ant bear bee bird camel cat cow crab crow deer dog duck eagle fish fox frog goat goose hawk horse lion
    lizard mole monkey moose mouse otter owl panda pig pony rabbit rat seal shark sheep snail snake spider swan tiger
    toad turtle whale wolf worm yak zebra"""
)

FRUITS = _words("apple banana cherry fig grape kiwi lemon lime mango melon olive orange peach pear plum berry")

OBJECTS = _words(
    """anchor arrow bag ball basket bed bell bench boat book bottle bowl box bread bridge brush bucket button cable cake
    camera candle car card chair clock cloud coat coin cup desk door drum engine feather fence flag flower fork garden
    gate glass glove guitar hammer hat house island jacket jar kettle key kite knife ladder lake lamp leaf letter map
    mirror moon mountain nail needle paper pencil piano pillow pipe plate pocket pond pot river road robot rocket roof
    rope sand scarf ship shirt shoe shovel sock spoon stamp star stone sun table tent tower train tree truck umbrella
    vase violin wagon wall watch wheel window"""
)

WORDS = COLORS + ANIMALS + FRUITS + OBJECTS
"""Every word that list tasks use; all distinct."""

FOODS = _words("pizza pasta soup rice salad cheese bread cake")

NAMES = _words(
    """Zora Anna Ben Carla David Emma Felix Grace Hugo Iris Jack Kira Leo Maya Nina Oscar Paul Quinn Rosa Sam Tara Uma
    Victor Wanda Xavier Yara Alice Bob Clara Diego Elena Frank Gina Henry Ivan Julia Karl Linda Marco Nora Olga Peter
    Rita Simon Tom Vera Walter Yuki Mia Lucas Sofia Max Eva Adam Lena Omar Amir Chen Priya Raj"""
)

CITIES = _words(
    """Paris London Berlin Tokyo Rome Madrid Oslo Cairo Lima Delhi Vienna Prague Lisbon Dublin Athens Boston Chicago
    Sydney Toronto Seoul"""
)

TOPICS = _words(
    """music history science physics art love money time space water fire light chess football cooking travel
    language poetry philosophy biology chemistry mathematics computers software networks gravity energy health sleep
    weather climate politics economics religion war peace movies games dreams colors numbers animals plants oceans
    planets stars quantum mechanics evolution democracy photosynthesis dinosaurs volcanoes robots bitcoin python rust
    linux kernels compilers databases transformers attention memory thermodynamics relativity"""
)

ADJECTIVES = _words("old new small big quiet happy lazy bright warm cold soft tall slow quick kind")

VERBS = _words("sees likes follows finds hides watches carries paints keeps leaves")

PLACES = _words("near the river|under the table|behind the house|on the road|in the garden|by the lake", "|")

SYLLABLES = _words(
    """ba be bo da de do fa fi ga go ha ka ke ki la le lo ma me mi mo na ne no pa pe ra re ri ro sa se so ta te ti to va
    vi za zu lin mar tor ven wick dan sel bor"""
)

NUMBER_WORDS = _words("zero one two three four five six seven eight nine ten eleven twelve")

OTHER_WORDS = (
    *NUMBER_WORDS[1:],
    *string.ascii_lowercase,
    *_words(
        """hello world foo bar baz alpha beta gamma delta north south east west spring summer autumn winter
        monday tuesday friday sunday january march july zucchini carrot potato tomato onion garlic pepper
        strawberry pineapple elephant kangaroo penguin dolphin giraffe wood iron copper steel doctor teacher
        king queen happy sad fast slow big small cold warm water fire earth air night day man woman child
        dream music time life cheese pizza soup phone laptop tea coffee milk sugar salt"""
    ),
)
"""Common words that people also put into lists. The tokenizer need not know them as one token."""
