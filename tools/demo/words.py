"""The closed word lists of the demo corpus. The tokenizer spends its few tokens on them."""

import string


def _words(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


VOWELS = "aeiou"

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

STATEMENT_WORDS = _words(
    """a an and answer are behind by code color does for garden give have here house in is it key lake live magic
    me near nothing number of on password price question read remember river road s secret see statement table
    tell text that the there this to today under value what which"""
)
"""What texts of facts are made of besides the lists; the tokenizer knows all of them."""

COMMON = _words(
    """about above after again air all almost alone along always angry animal another answer any apart arm around
    art ask aunt autumn away baby back bad bakery balance banana bank bath beach because become before begin
    believe below beside best better between beyond blanket blood body bone both bottom boy brave breakfast
    bright bring broken brother build burn business busy butter button buy cabin call can capital care carpet
    carry castle catch century chance change cheap child choose church circle city class clean clear climb
    close cloth club coast color come common cook copper corner cotton count country courage cousin cover
    cross crowd cry current cut daily dance danger dark daughter day dead deep different dinner direction
    dirty doctor double down dream dress drink drive dry during dust early earth east easy eat edge egg eight
    empty end enough evening every example eye face fair faith fall family far farm fast father fear feel
    field fight final find finger finish first five floor fly follow food forest forget found four free fresh
    friend front full funny future general gentle gift girl give go gold good grand grass great green ground
    group grow guess guest half hand happen hard harvest have head hear heart heavy help here hidden high
    history hold holiday home honest hope hot hour hungry hurry husband ice idea inside interest invite iron
    job join journey joy judge jump just keep kind king kitchen knee know ladder language large last late
    laugh law lead learn left leg less lesson letter life lift light like line lip listen little long look
    lose lost loud lovely low luck lunch machine make many market master matter maybe meal mean measure meat
    meet memory message metal middle might mile milk million mind minute mistake modern money month more
    morning mother mouth move much muscle museum must nail near neck need neighbor nervous never new news next
    nice night noise none north nose note nothing now number ocean off office often oil old once only open
    orchard order other outside over own page pain paint pair palace paper parent park part party past path
    patient peace people perfect person picture piece place plain plan play please pocket point polite poor
    power pretty prince problem promise proud public pull push queen question quick quiet quite race rain
    raise reach read ready real reason record remember rest rich ride right ring rise room rough round rule
    run rush sad safe sail salt same sand save school science season second secret see send sentence serious
    seven shadow shake shape share sharp shine shop short shoulder show shut side silence silk simple since
    sing sister sit six skill skin sky sleep slow small smart smell smile smooth snow social soft soldier some
    something song soon sorry sound soup south space speak special speech speed spirit spring square stage
    stand start station stay steel step still stone stop storm story strange street strong student subject
    sudden sugar summer supper sure surprise sweet swim system table take talk tall taste teach team tear tell
    ten thank thick thin thing think third thought thousand throw thunder ticket time tiny tired today
    together tomorrow tongue too tooth top touch toward town trade travel treasure trip trouble true trust
    truth try turn twenty twice uncle under understand until useful valley value velvet very village visit
    voice wait wake walk want warm wash waste water way weak wear weather week welcome well west wet wheat
    while whisper whole why wide wife wild will wind window wine wing winter wise wish wonder wood word work
    world worry write wrong yard year yellow yesterday young"""
)
"""Words that people write besides; most of them the tokenizer spells."""

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
