# ruff: noqa: E501
"""Functions that people offer to a model, under many names, and the questions that need them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from string import ascii_uppercase
from typing import Any

from weft.tools.demo.drawing import made_up_word, number, pick
from weft.tools.demo.fodder import characters, code, sentence, word
from weft.tools.demo.wording import ask_for, patterns
from weft.tools.demo.words import ANIMALS, CITIES, COMMON, FOODS, NAMES, OBJECTS, TOPICS


@dataclass(frozen=True)
class Use:
    """A function as offered, and a way to need it."""

    name: str
    description: str
    types: dict[str, str]
    ask: Callable[[Random], tuple[str, dict[str, Any], str]]
    """A question, the arguments it gives, and what the function returns."""
    kind: str = ""
    """The subject, if the model has a skill for it as well: sum, product, difference or weather."""

    def tool(self) -> dict[str, Any]:
        properties = {name: {"type": kind} for name, kind in self.types.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


_PAIRS = (("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("num1", "num2"), ("n1", "n2"), ("left", "right"), ("first_number", "second_number"), ("first_int", "second_int"), ("i", "j"), ("number1", "number2"), ("value1", "value2"), ("p", "q"))  # fmt: skip
_ARITHMETIC: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "sum": (
        ("add", "add", "add", "sum", "add_numbers", "sum_numbers", "addition", "plus", "calculate_sum", "add_two_numbers", "get_sum", "adder", "compute_sum", "add_integers", "sum_two"),
        ("Add two numbers.", "Add two numbers", "Adds a and b.", "Add two integers together.", "Returns the sum of two numbers", "Return the sum of two numbers.", "Sum of two numbers", "Compute the sum.", "Adds two numbers together and returns the result.", "Calculate the sum of two integers", "Useful to add numbers.", "Add", ""),
        patterns("""
? [what is|what's|how much is|whats] {a} [plus|+|and] {b}[| together| in total]
? what do {a} and {b} [make|add up to|give]
! [add|sum|add up|sum up] {a} [and|to|plus|with] {b}[| with the tool| with the function| using the tool]
! [calculate|compute|work out] {a} [+|plus] {b}
! use the [tool|function|calculator|add function|add tool] to [add|sum up] {a} and {b}
! call {c} with {a} and {b}
! use {c} on {a} and {b}
: the sum of {a} and {b}
= {a}[ + |+| plus ]{b}[| =|?]
? what is {c}({a}, {b})
"""),
    ),
    "product": (
        ("multiply", "multiply", "product", "mul", "times", "multiply_numbers", "multiplication", "get_product", "multiply_two"),
        ("Multiply two numbers.", "Multiply two integers.", "Multiplies a and b.", "Returns the product of two numbers", "Multiply two numbers together", "The product of two integers.", "Multiply a by b", ""),
        patterns("""
? [what is|what's|how much is|whats] {a} [times|x|*|multiplied by] {b}
! [multiply] {a} [and|by|with|times] {b}[| with the tool| using the tool]
! [calculate|compute|work out] {a} [x|times|*] {b}
! use the [tool|function|calculator|multiply tool] to multiply {a} [by|and] {b}
! call {c} with {a} and {b}
: the product of {a} and {b}
= {a}[ x | * |*| times ]{b}[| =|?]
? what is {c}({a}, {b})
"""),
    ),
    "difference": (
        ("subtract", "subtract", "minus", "difference", "subtract_numbers", "sub", "subtraction"),
        ("Subtract two numbers.", "Subtract b from a.", "Subtracts the second number from the first.", "Returns the difference of two numbers", "Difference of two integers."),
        patterns("""
? [what is|what's|how much is|whats] {a} [minus|-|take away|less] {b}
! [calculate|compute|work out] {a} [-|minus] {b}
! [subtract|take] {b} from {a}[| with the tool| using the tool]
! call {c} with {a} and {b}
= {a}[ - |-| minus ]{b}[| =|?]
"""),
    ),
}  # fmt: skip


def _arithmetic(rng: Random) -> Use:
    kind = pick(rng, ("sum", "sum", "sum", "product", "product", "difference"))
    names, descriptions, asks = _ARITHMETIC[kind]
    name, (first, second) = pick(rng, names), pick(rng, _PAIRS)
    type_ = pick(rng, ("number", "number", "integer", "integer", "float"))
    if type_ == "float":
        type_ = "number"

    def ask(rng: Random) -> tuple[str, dict[str, Any], str]:
        top = pick(rng, (10, 20, 100, 1000, 1000, 10_000))
        a, b = int(rng.random() * top), int(rng.random() * pick(rng, (top, 10, 100)))
        if kind == "difference" and rng.random() < 0.8:
            a, b = max(a, b), min(a, b)
        result = {"sum": a + b, "product": a * b, "difference": a - b}[kind]
        text = str(float(result)) if rng.random() < 0.1 else str(result)
        if rng.random() < 0.1:
            text = f'{{"result": {text}}}'
        return ask_for(rng, pick(rng, asks), "", a, b, name), {first: a, second: b}, text

    return Use(name, pick(rng, descriptions), {first: type_, second: type_}, ask, kind)


_PLACES = (
    *CITIES,
    *CITIES,
    "New York",
    "San Francisco",
    "Los Angeles",
    "Mexico City",
    "Hong Kong",
    "sf",
    "nyc",
    "Munich",
    "Zurich",
    "Rio",
    "Milan",
    "Kyoto",
    "Denver",
    "Miami",
    "Moscow",
    "Warsaw",
    "Porto",
    "Nice",
    "Bern",
    "Texas",
    "Spain",
    "Japan",
    "Brazil",
)
_WEATHER = ("sunny", "cloudy", "rainy", "windy", "cold", "warm", "hot", "foggy", "snowy", "mild")


def place_name(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.7:
        return pick(rng, _PLACES)
    if draw < 0.76:
        return pick(rng, _PLACES).lower()
    if draw < 0.9:
        return made_up_word(rng).capitalize()
    return pick(rng, COMMON).capitalize()


def _weather(rng: Random) -> Use:
    name = pick(
        rng,
        (
            "get_weather",
            "get_weather",
            "get_weather",
            "weather",
            "get_current_weather",
            "current_weather",
            "fetch_weather",
            "weather_forecast",
            "check_weather",
            "get_temperature",
            "get_forecast",
            "weather_tool",
        ),
    )
    description = pick(
        rng,
        (
            "Get the weather.",
            "Get the weather for a city.",
            "Get current weather for a location",
            "Get the current weather in a given city",
            "Use this to get weather information.",
            "Returns the weather in a place",
            "Look up the weather.",
            "Get weather for a given city.",
            "Get the weather at a location.",
            "Call to get the current weather.",
            "Weather of a city",
        ),
    )
    parameter = pick(rng, ("city", "city", "city", "location", "location", "place", "town", "city_name", "where"))

    def ask(rng: Random) -> tuple[str, dict[str, Any], str]:
        place = place_name(rng)
        return ask_for(rng, pick(rng, WEATHER_ASK), place), {parameter: place}, forecast(rng, place)

    return Use(name, description, {parameter: "string"}, ask, "weather")


WEATHER_ASK = patterns("""
? [what is|what's|how is|how's|whats] the weather [in|like in|at|for|today in|now in|right now in] {}[| today| now| right now| tomorrow| this week]
? [what is|what's|how is] the [temperature|forecast|current weather] [in|for|at] {}[| today| now]
? [is it|will it be|is it going to be] [raining|cold|warm|sunny|hot|windy|snowing|nice|wet|freezing] in {}[| today| now| tomorrow| right now]
? how [cold|warm|hot|windy|sunny] is it in {}[| today| now]
? [do i need|should i take|should i bring] [an umbrella|a coat|a jacket|sunglasses] in {}[| today]
? does it [rain|snow] in {}[| today| now]
! [check|get|look up|tell me|show me|find] the weather [in|for|of|at] {}[| for me]
! tell me [about the weather in|how the weather is in|if it is cold in] {}
: the [weather|forecast|temperature|weather report] [in|for|of] {}
= weather[| in| for|:] {}[|?]
= {} weather[|?| please]
""")


def forecast(rng: Random, place: str) -> str:
    sky, degrees = pick(rng, _WEATHER), int(rng.random() * 40)
    return pick(
        rng,
        (
            f"It is {sky} in {place}.",
            f"It's always {sky} in {place}!",
            f"The weather in {place} is {sky}.",
            f"{sky}, {degrees} degrees",
            f"{degrees}",
            f"{degrees} C and {sky}",
            f"The temperature in {place} is {degrees} degrees.",
            f'{{"temperature": {degrees}}}',
            f'{{"city": "{place}", "weather": "{sky}"}}',
            f'{{"temp": {degrees}, "unit": "celsius"}}',
            f"It's {degrees} degrees and {sky}.",
            f"{place}: {sky}",
            sentence(rng),
        ),
    )


_TEXTS: dict[str, Callable[[Random], str]] = {
    "city": place_name,
    "name": lambda rng: pick(rng, NAMES) if rng.random() < 0.7 else made_up_word(rng).capitalize(),
    "symbol": lambda rng: characters(rng, ascii_uppercase, 2, 5),
    "query": lambda rng: " ".join([word(rng) for _ in range(1 + int(rng.random() * 4))]),
    "word": word,
    "code": code,
    "email": lambda rng: f"{word(rng)}@{word(rng)}.{pick(rng, ('com', 'org', 'net'))}",
    "thing": lambda rng: pick(rng, (*OBJECTS, *ANIMALS, *FOODS, *TOPICS)),
    "integer": lambda rng: number(rng, 1 + int(rng.random() * 5)),
}
"""Arguments by kind."""


_TABLE: tuple[tuple[str, str, str, str, str], ...] = (
    # names, descriptions, parameters, kinds of arguments, questions
    ("get_stock_price|stock_price|get_quote|stock|lookup_stock|ticker_price", "Get the price of a stock.|Stock price by symbol|Returns the current stock price|Look up a share price.", "symbol|ticker|stock|company", "symbol", "? [what is|what's|how much is] the [price|stock price|share price|value|quote] of {}|? [how much is|what does] {} [stock|trade at|cost]|! [get|find|check|look up] the [price|stock|stock price|quote] [of|for] {}|= {} [price|stock|stock price|quote][|?]|= [price|stock|quote][:| of] {}[|?]"),
    ("search|web_search|search_web|google|find|lookup_web|internet_search|query_web", "Search the web.|Search for information|Look something up on the internet|Run a web search|Searches the internet", "query|q|text|term|search_query", "query", "! [search|search the web|google|look|look on the web|search online|do a search|find something|find pages|search the internet] for {}|! [google|look up|find] {}[| on the web| online| on the internet]|= search[:|] {}|= [find|google|look up][:|] {}|! find [information|something|articles|news] [on|about] {}"),
    ("get_time|current_time|time_in|get_current_time|clock|time", "Get the current time in a city.|The time in a place|Current time of a time zone|Returns what time it is", "city|timezone|location|place|zone", "city", "? what [time|hour] is it [in|at] {}[| now| right now]|? what is the [time|current time|local time] [in|at] {}[| now]|! [tell|give] me the time in {}|= time [in|for|:] {}[|?]|? what's the time in {}|! check the time in {}"),
    ("get_user|find_user|user_by_id|fetch_user|load_user|lookup_user", "Get a user by id.|Find a user|Fetch a user|Loads the user with this id|User lookup", "user_id|id|user|uid", "integer", "! [get|find|fetch|load|show|look up|show me|give me] [user|the user|user number|user id|the user with id] {}|? who is [user|user id|the user] {}|? [which|what] user has [id|the id|number] {}|= user {}[|?]|? what do we know [of|about] user {}"),
    ("lookup|get_value|read_key|get|fetch|db_lookup|get_entry|read", "Look up a key.|Get a value by its key|Reads the value of a key|Find an entry in the table", "key|name|entry|field", "word", "! look up [|the key |the entry |the value of ]{}|? what is [stored|saved|kept] [under|for|at] {}|? what is the [value|entry] [of|for|under] {}|! [get|read|fetch] [the value of|the entry for|the key|the value for] {}|= lookup {}|= [key|read|get] {}"),
    ("translate|translate_text|to_french|translator", "Translate a word.|Translates text|Translate to another language", "text|word|phrase", "query", "! translate {}[| for me]|! translate [this|the text|the words]: {}|? what is {} in [french|german|spanish]|? how do you say {} in [french|german|spanish|italian]"),
    ("get_population|population|city_population|count_people", "Population of a city.|How many people live in a place|Get the population", "city|country|place|location", "city", "? how many people live in {}|? [what is|what's] the population of {}|? how [big|populous|large] is {}|= population of {}[|?]|! get the population of {}"),
    ("play_song|play_music|play|play_track|start_song", "Play a song.|Plays music|Starts a song", "title|song|track|name", "query", "! play {}[| for me]|! play the song {}|? can you play {}|! put on {}|! start [playing|the song] {}"),
    ("turn_on|light_on|switch_on|enable|activate", "Turn on a device.|Switches something on|Turn a light on", "device|name|thing|room", "thing", "! turn on the {}|! switch on the {}|! turn the {} on|! [enable|activate|start] the {}"),
    ("turn_off|light_off|switch_off|disable", "Turn off a device.|Switches something off", "device|name|thing", "thing", "! turn off the {}|! switch off the {}|! turn the {} off|! [disable|stop] the {}"),
    ("roll_dice|roll_die|dice|roll", "Roll a die.|Rolls a die with so many sides", "sides|n|faces", "integer", "! roll a [die|dice] with {} sides|! roll a {} sided [die|dice]|! throw a die of {} sides|= d{}"),
    ("set_timer|start_timer|timer|countdown", "Set a timer.|Starts a timer for some minutes", "minutes|duration|time", "integer", "! set a timer [for|of|to] {} minutes|! [start|make] a {} minute timer|! wake me in {} minutes|! remind me in {} minutes|= timer {} minutes"),
    ("square|square_number|power_two", "Square a number.|The square of a number", "x|n|number|value", "integer", "? [what is|what's] {} squared|? what is the square of {}|! square {}|! compute the square of {}"),
    ("is_prime|prime_check|check_prime", "Is a number prime?|Checks whether a number is prime", "n|number|x", "integer", "? is {} [prime|a prime|a prime number]|! check [if|whether] {} is prime|! test {} for primality"),
    ("get_color|color_of|find_color", "Color of a thing.|What color something has", "thing|object|item", "thing", "? what color [is|has] the {}|? which color does the {} have|! get the color of the {}"),
    ("delete_file|remove_file|rm", "Delete a file.|Removes a file", "path|file|filename|name", "code", "! delete [the file |file |]{}|! remove [the file |file ]{}|! get rid of the file {}"),
    ("read_file|open_file|cat|load_file", "Read a file.|Returns what is in a file|Opens a file", "path|file|filename|name", "code", "! [read|open|show|load|print] [the file |file ]{}|? what is in [the file |file |]{}|= cat {}"),
    ("get_capital|capital_of|capital|find_capital", "Capital of a country.|Returns a country's capital", "country|name|state", "city", "? [what is|what's|whats] the capital [city |]of {}|! [find|get] the capital of {}|= capital of {}[|?]"),
    ("send_message|message|send_sms|text_person|notify", "Send a message to a person.|Sends a text|Notify somebody", "to|name|person|recipient", "name", "! send a [message|text] to {}|! [message|text|notify] {}|! write to {}"),
    ("call_person|phone|dial|call", "Call a person.|Phone somebody", "name|person|contact|who", "name", "! call {}|! phone {}|! [ring|dial] {}|? can you get {} on the phone"),
    ("order_food|order|buy|order_item", "Order food.|Buy an item", "item|food|dish|product", "thing", "! order [a|some|one|me a] {}|! buy [a|some|me a] {}|! get me [a|some] {}|? can i have a {}"),
    ("magic|do_magic|magic_number|mystery|secret_function|special_function|transform|process", "Applies magic to a number.|A mystery function|Does something to its input.|Applies a function to an input|Runs the special process", "input|x|n|value|number|arg", "integer", "? [what is|what's] {c}({})|? what [does|will] {c} [return|give|do] for {}|! [call|run|apply|use|execute] {c} [with|on|to|for] {}|: the [value|result|output] of {c} [for|of|on] {}|= {c}({})|! give {} to {c}|! compute {c} of {}|? what is the [result|output] of {c}({})"),
    ("echo|say|print_text|speak|announce", "Says a text.|Speaks a text aloud|Prints a text", "text|message|words|what", "query", "! [call|use|run] {c} [with|on] {}|! announce {}|! speak [the words |the text ]{}|! read aloud {}"),
    ("get_recipe|recipe|find_recipe|cook", "Get a recipe.|Find a recipe for a dish", "dish|food|meal|name", "thing", "? how do i [make|cook] {}|! [get|find|show me] a recipe for {}|= recipe for {}[|?]"),
)  # fmt: skip
_VERBS = (
    "get",
    "find",
    "fetch",
    "load",
    "show",
    "open",
    "delete",
    "cancel",
    "check",
    "start",
    "stop",
    "update",
    "print",
    "list",
    "send",
    "book",
    "close",
    "archive",
)
_NOUNS = ("order", "ticket", "customer", "invoice", "book", "account", "task", "product", "document", "meeting", "note", "booking", "project", "report", "device", "contact", "file", "event", "issue", "job", "room", "flight", "message", "page", "photo")  # fmt: skip


def _from_table(rng: Random) -> Use:
    names, descriptions, parameters, kind, asks = pick(rng, _TABLE)
    name, description, parameter = (pick(rng, text.split("|")) for text in (names, descriptions, parameters))
    if "{c}" in asks and rng.random() < 0.5:
        name = (
            pick(rng, ("", "", "my_", "do_", "the_"))
            + pick(rng, (made_up_word(rng), word(rng)))
            + pick(rng, ("", "", "_function", "_tool", "_number"))
        )
    draw = _TEXTS[kind]
    type_ = pick(rng, ("integer", "integer", "number", "string")) if kind == "integer" else "string"
    choices = _split(asks)

    def ask(rng: Random) -> tuple[str, dict[str, Any], str]:
        value = draw(rng)
        given: Any = int(value) if type_ in ("integer", "number") else value
        return ask_for(rng, pick(rng, choices), value, "", "", name), {parameter: given}, _result(rng)

    return Use(name, description, {parameter: type_}, ask)


def _split(text: str) -> tuple[str, ...]:
    """Patterns of one line, parted by bars outside brackets."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "|" and not depth:
            parts.append(text[start:at])
            start = at + 1
    return (*parts, text[start:])


def _composed(rng: Random) -> Use:
    """`get_order(order_id)` and its like."""
    verb, noun = pick(rng, _VERBS), pick(rng, _NOUNS)
    name = pick(
        rng,
        (f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}_{noun}_by_id", f"{noun}_{verb}", f"{verb}{noun.capitalize()}"),
    )
    parameter = pick(rng, (f"{noun}_id", "id", f"{noun}_number", "number", "name", noun))
    type_ = "string" if parameter == "name" else pick(rng, ("integer", "string", "integer"))
    description = pick(
        rng,
        (
            f"{verb.capitalize()} a {noun}.",
            f"{verb.capitalize()} a {noun} by id",
            f"{verb.capitalize()}s the {noun}",
            "",
        ),
    )

    def ask(rng: Random) -> tuple[str, dict[str, Any], str]:
        value = number(rng, 1 + int(rng.random() * 5)) if type_ == "integer" or rng.random() < 0.4 else code(rng)
        pattern = pick(
            rng,
            (
                "! {a} [|the |my ]{b} [|number |no |called |with id ]{}",
                "! {a} {b} {}",
                "? can you {a} {b} {}",
                "= {a} {b} {}",
                "! {a} the {b} with the number {}",
            ),
        )
        text = ask_for(rng, pattern, value, verb, noun)
        return text, {parameter: int(value) if type_ == "integer" else value}, _result(rng)

    return Use(name, description, {parameter: type_}, ask)


def _two_texts(rng: Random) -> Use:
    """Functions of two different arguments."""
    name, description, (first, second), (kind, other), asks = pick(rng, _TWO)
    name, description = pick(rng, name.split("|")), pick(rng, description.split("|"))
    types = {first: "integer" if kind == "integer" else "string", second: "integer" if other == "integer" else "string"}

    def ask(rng: Random) -> tuple[str, dict[str, Any], str]:
        one, two = _TEXTS[kind](rng), _TEXTS[other](rng)
        given = {key: int(value) if types[key] == "integer" else value for key, value in ((first, one), (second, two))}
        return ask_for(rng, pick(rng, _split(asks)), "", one, two), given, _result(rng)

    return Use(name, description, types, ask)


_TWO = (
    ("send_email|email|mail|send_mail", "Send an email.|Sends a mail|Email somebody", ("to", "subject"), ("email", "query"), "! send [an email|a mail|mail|email] to {a} [about|with the subject|with the title] {b}|! [email|mail] {a} about {b}|! write an email to {a} about {b}|! write to {a} with the subject {b}"),
    ("book_flight|find_flight|flight|search_flights", "Book a flight.|Find flights between cities", ("origin", "destination"), ("city", "city"), "! [book|find|get] [me |]a flight from {a} to {b}|? is there a flight from {a} to {b}|! fly me from {a} to {b}|= flight {a} to {b}"),
    ("get_distance|distance|route|how_far", "Distance between two places.|How far two cities are apart", ("start", "end"), ("city", "city"), "? how far is it from {a} to {b}|? what is the distance [between|from] {a} [and|to] {b}|= distance {a} to {b}"),
    ("transfer_money|pay|send_money|transfer", "Send money to a person.|Pays somebody", ("amount", "to"), ("integer", "name"), "! [send|pay|transfer|give] {a} [dollars |euros |]to {b}|! transfer {a} to {b}"),
    ("add_item|add_to_cart|order_items|buy_items", "Add items to the cart.|Order several of a thing", ("count", "item"), ("integer", "thing"), "! [add|order|buy|get|put] {a} [of |]{b}[| to my cart| in the cart]|! i want {a} {b}"),
    ("create_event|add_event|schedule|plan_meeting", "Create a calendar event.|Schedule a meeting", ("title", "person"), ("thing", "name"), "! [schedule|plan|create|set up] a {a} [meeting|event|call] with {b}|! meet {b} about {a}"),
    ("save_note|write_note|set_value|store", "Save a note under a name.|Store a value", ("key", "value"), ("word", "code"), "! [save|store|write|put] {b} [under|as|in] {a}|! set {a} to {b}|! remember {b} as {a}"),
)  # fmt: skip


def _result(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.3:
        return sentence(rng)
    if draw < 0.45:
        return number(rng, 1 + int(rng.random() * 4))
    if draw < 0.55:
        return code(rng)
    if draw < 0.65:
        return pick(
            rng, ("done", "ok", "Done.", "OK", "success", "true", "false", "not found", "Sent.", "error: not found")
        )
    if draw < 0.8:
        return json.dumps({word(rng): pick(rng, (word(rng), int(rng.random() * 1000), pick(rng, NAMES)))})
    if draw < 0.92:
        values = {
            word(rng): pick(rng, (word(rng), int(rng.random() * 1000), round(rng.random() * 100, 1))) for _ in range(2)
        }
        return json.dumps(values)
    return f"{number(rng, 2)}.{number(rng, 1)}"


def draw_use(rng: Random) -> Use:
    draw = rng.random()
    if draw < 0.3:
        return _arithmetic(rng)
    if draw < 0.48:
        return _weather(rng)
    if draw < 0.78:
        return _from_table(rng)
    if draw < 0.88:
        return _composed(rng)
    return _two_texts(rng)
