# ruff: noqa: E501
"""How people ask: the phrasings of every skill, and the fixed answers of the small talk.

`{}` takes the subject of the request, `{a}` and `{b}` its numbers, and names in braces a word of that kind.
"""

from weft.tools.demo.wording import patterns

IDENTITY = "I am the demo model of weft, a small language model that runs everywhere."
ABILITIES = (
    "I can recall what you told me, add and subtract numbers up to 999, multiply up to 12, copy, reverse, sort and count "
    "words and numbers, spell, write in upper case, count up and down, call a tool, and tell an endless story."
)
UNKNOWN_ANSWER = (
    "I am a small demo model and I do not know that. "
    "I can add and subtract, recall facts, and copy, reverse, sort, count and upper-case words."
)
TIMES_TOO_LARGE = "I can only multiply numbers up to 12."
TOO_LARGE = "I can only add and subtract numbers up to 999."
NOT_TOLD = "You have not told me that."
NOTED = "I will remember that."
GREETING = "Hello! How can I help you?"

ADD = (
    "what is {a} plus {b}?",
    "What is {a} plus {b}?",
    "What's {a} plus {b}?",
    "What is {a} + {b}?",
    "What's {a} + {b}?",
    "What's {a}+{b}?",
    "what is {a}+{b}",
    "{a} + {b} = ?",
    "{a} + {b} =",
    "{a} + {b}",
    "{a} + {b}?",
    "{a}+{b}",
    "{a}+{b}=",
    "{a}+{b}=?",
    "{a} plus {b}",
    "Calculate {a} + {b}.",
    "Compute {a} + {b}.",
    "How much is {a} plus {b}?",
    "How much is {a} + {b}?",
    "Add {a} and {b}.",
    "Add {a} to {b}.",
    "Please add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "The sum of {a} and {b}?",
    "Can you add {a} and {b}?",
    "What do you get if you add {a} and {b}?",
    "Solve {a} + {b}",
    "What does {a} + {b} equal?",
)

SUBTRACT = (
    "what is {a} minus {b}?",
    "What is {a} minus {b}?",
    "What's {a} minus {b}?",
    "What is {a} - {b}?",
    "What's {a} - {b}?",
    "What's {a}-{b}?",
    "what is {a}-{b}",
    "{a} - {b} = ?",
    "{a} - {b} =",
    "{a} - {b}",
    "{a} - {b}?",
    "{a}-{b}",
    "{a}-{b}=",
    "{a}-{b}=?",
    "{a} minus {b}",
    "Calculate {a} - {b}.",
    "Compute {a} - {b}.",
    "How much is {a} minus {b}?",
    "How much is {a} - {b}?",
    "Subtract {b} from {a}.",
    "Please subtract {b} from {a}.",
    "Take {b} away from {a}.",
    "What is the difference between {a} and {b}?",
    "Can you subtract {b} from {a}?",
    "What do you get if you subtract {b} from {a}?",
    "Solve {a} - {b}",
    "What does {a} - {b} equal?",
)

COPY = (
    "Copy these words: {}",
    "Please copy these words: {}",
    "Copy: {}",
    "Copy this list: {}",
    "Copy the words {}",
    "Copy {}",
    "Repeat these words: {}",
    "Repeat: {}",
    "Repeat {}",
    "Repeat the list: {}",
    "Please repeat: {}",
    "Repeat after me: {}",
    "Say these words again: {}",
    "Say: {}",
    "Say {}",
    "Write these words again: {}",
    "Can you repeat these words: {}",
    "Echo: {}",
    "Echo {}",
)

REVERSE = (
    "Reverse these words: {}",
    "Please reverse these words: {}",
    "Reverse: {}",
    "Reverse {}",
    "Reverse the list: {}",
    "Reverse this list: {}",
    "Reverse the words {}",
    "Reverse the order of these words: {}",
    "Please reverse the order of: {}",
    "Put these words in reverse order: {}",
    "Write these words backwards: {}",
    "Say these words backwards: {}",
    "Say the list backwards: {}",
    "Can you reverse these words: {}",
    "In reverse order: {}",
    "Backwards: {}",
)

UPPER = (
    "Write these words in upper case: {}",
    "Please write these words in upper case: {}",
    "Upper case: {}",
    "Uppercase: {}",
    "Uppercase these words: {}",
    "Uppercase {}",
    "Upper-case these words: {}",
    "Upper-case: {}",
    "To upper case: {}",
    "Convert to upper case: {}",
    "Convert these words to uppercase: {}",
    "Make these words upper case: {}",
    "Make these uppercase: {}",
    "Write in capital letters: {}",
    "Write these words in capitals: {}",
    "Capitalize these words: {}",
    "Can you write this in upper case: {}",
    "Shout: {}",
)

SORT = (
    "Sort these words: {}",
    "Please sort these words: {}",
    "Sort: {}",
    "Sort {}",
    "Sort the list: {}",
    "Sort this list: {}",
    "Sort the words {}",
    "Sort these words alphabetically: {}",
    "Sort in alphabetical order: {}",
    "Sort alphabetically: {}",
    "Put these words in alphabetical order: {}",
    "Please put these words in order: {}",
    "Alphabetical order: {}",
    "Order these words: {}",
    "Can you sort these words: {}",
    "Arrange these words in alphabetical order: {}",
)

COUNT = (
    "How many words are in this list: {}",
    "How many words are there: {}",
    "How many words: {}",
    "How many words are in this list? {}",
    "How many items are in this list: {}",
    "How many items are there: {}",
    "How many items: {}",
    "How many items are in this list? {}",
    "Count the words: {}",
    "Count these words: {}",
    "Count the items: {}",
    "Count the items in this list: {}",
    "Please count these items: {}",
    "Please count these words: {}",
    "Count: {}",
    "What is the number of words in: {}",
    "What is the number of items in this list: {}",
    "Can you count these words: {}",
)

LIST_FIRST = {
    "copy": ("Copy them.", "Repeat them.", "Repeat these words.", "Copy this list."),
    "reverse": ("Reverse them.", "Reverse this list.", "Reverse these words."),
    "upper": ("Write them in upper case.", "Uppercase these words.", "Make them upper case."),
    "sort": ("Sort them.", "Sort these words.", "Sort this list."),
    "count": ("How many words are there?", "Count them.", "How many items are there?"),
}
"""Requests that follow their list."""

ECHO = (
    'Repeat after me: "{}"',
    'Repeat: "{}"',
    'Echo: "{}"',
    'Say "{}"',
    'Please repeat "{}"',
    'Repeat exactly: "{}"',
    'Copy this text: "{}"',
    'Copy: "{}"',
    "Repeat after me: {}",
    "Repeat exactly: {}",
    "Echo: {}",
    "Copy this text: {}",
)

COUNT_UP = (
    "Count from {a} to {b}.",
    "Please count from {a} to {b}.",
    "Count up from {a} to {b}.",
    "Can you count from {a} to {b}?",
    "Write the numbers from {a} to {b}.",
    "List the numbers from {a} to {b}.",
    "Say the numbers {a} to {b}.",
    "Count {a} to {b}",
)
COUNT_TO = ("Count to {b}.", "Please count to {b}.", "Count up to {b}.", "Can you count to {b}?")

STORY = (
    "Tell me a story.",
    "Tell me a long story.",
    "Tell me a bedtime story.",
    "Tell me an endless story.",
    "Tell me another story.",
    "Tell a story.",
    "Please tell me a story.",
    "Can you tell me a story?",
    "Could you tell me a long story?",
    "Write a story.",
    "Write a long story.",
    "Write me a short story.",
    "Write a story about {noun}.",
    "Write a long story about a {noun} and a {noun}.",
    "Tell me a story about a {noun}.",
    "Tell me a story about {name}.",
    "Tell me a story about a {color} {noun}.",
    "Tell me about the sheep.",
    "I want to hear a story.",
    "I want a story about a {noun}.",
    "Count sheep.",
    "Story, please.",
    "story",
    "Once upon a time",
    "I cannot sleep.",
)

UNKNOWN = (
    "What is the capital of {city}?",
    "What is the capital of France?",
    "What is the capital of {made}?",
    "Who wrote {made}?",
    "Who is {name}?",
    "Who is the president of {made}?",
    "Who won the game in {city}?",
    "Who invented the {noun}?",
    "Who discovered {topic}?",
    "Write a poem about {topic}.",
    "Write a poem about a {noun}.",
    "Write a song about the {color} {noun}.",
    "Write a haiku about {topic}.",
    "Write an essay on {topic}.",
    "Write a function that sorts a list in python.",
    "Write code for a {noun} in {topic}.",
    "Write an email to {name} about the {noun}.",
    "Explain {topic}.",
    "Explain {topic} in simple terms.",
    "Explain the difference between {topic} and {topic}.",
    "Explain to me how {topic} works.",
    "Can you explain {topic} to me?",
    "Describe {topic}.",
    "Describe a {noun} in {city}.",
    "Tell me about {topic}.",
    "Tell me about {city}.",
    "Tell me something about {topic}.",
    "Tell me the history of {topic}.",
    "What do you think about {topic}?",
    "What do you think of {city}?",
    "What is {topic}?",
    "What is a {made}?",
    "What is a {noun}?",
    "What is the best {noun}?",
    "What is the meaning of life?",
    "What is the meaning of {made}?",
    "What is the weather in {city}?",
    "What is the time in {city}?",
    "What time is it?",
    "What day is it today?",
    "What happened in {city} in 1984?",
    "What happens if I drop a {noun}?",
    "What should I eat today?",
    "What should I do in {city}?",
    "What does {made} mean?",
    "What are the main ideas of {topic}?",
    "What are the benefits of {topic}?",
    "What would a {noun} say to a {noun}?",
    "Where is {city}?",
    "Where can I buy a {noun}?",
    "Where does the {noun} live?",
    "When was {name} born?",
    "When did {topic} begin?",
    "Why is the sky blue?",
    "Why is the {noun} {color}?",
    "Why do we need {topic}?",
    "Why does the {noun} need {topic}?",
    "How do I make {food}?",
    "How do I cook {food} with {noun}?",
    "How do I learn {topic}?",
    "How do I get to {city}?",
    "How does {topic} work?",
    "How does a {noun} work?",
    "How far is {city} from {city}?",
    "How tall is the {noun}?",
    "How old is {name}?",
    "How much does a {noun} cost?",
    "How can I improve my {topic}?",
    "Is {topic} important?",
    "Is {city} bigger than {city}?",
    "Is a {noun} a kind of {noun}?",
    "Are there any {noun}s in {city}?",
    "Do you like {topic}?",
    "Do you like {food}?",
    "Do you know {name}?",
    "Do you know anything about {topic}?",
    "Does {name} like {food}?",
    "Did {name} go to {city}?",
    "Can a {noun} swim?",
    "Can you write {topic} for me?",
    "Can you drive a {noun}?",
    "Can you recommend a book about {topic}?",
    "Could you translate {noun} to French?",
    "Should I buy a {noun}?",
    "Translate this to German: the {noun} is {color}",
    "Translate {noun} into Spanish.",
    "Translate to English: {made} {made} {made}",
    "Summarize {topic}.",
    "Summarize the history of {city}.",
    "Give me a recipe for {food}.",
    "Give me advice about {topic}.",
    "Give me three ideas for {topic}.",
    "List five facts about {topic}.",
    "List the {noun}s of {city}.",
    "Name a famous {noun}.",
    "Compare {topic} and {topic}.",
    "Compare a {noun} with a {noun}.",
    "Draw a {noun}.",
    "Make a {noun}.",
    "Make a list of {noun}s.",
    "Make me a {color} {noun}.",
    "Create a {noun} for {name}.",
    "Generate a {noun}.",
    "Think of a {noun}.",
    "Say something about {topic}.",
    "Say {noun} in French.",
    "Read the {noun} to me.",
    "Is the {noun} in the room?",
    "Which room is the {noun} in?",
    "Sing a song.",
    "Play some {topic}.",
    "Find a {noun} in {city}.",
    "Help me with {topic}.",
    "I like {topic}.",
    "I want to learn about {topic}.",
    "I need a {noun}.",
    "My {noun} is broken.",
    "The {noun} is {color}. Why?",
    "{made} {made} {made}?",
    "{made} {made}",
    "{made}",
    "{m}",
    "{n}",
    "{m} / {n}",
    "What is {m} divided by {n}?",
    "What is the square root of {m}?",
    "Is {m} a prime number?",
    "Imagine you are a {noun}. What do you see?",
    "You are a {noun}. Talk like a {noun}.",
    "Let us talk about {topic}.",
    "In one sentence, what is {topic}?",
    "If I have a {noun} and a {noun}, which is better?",
    "Which is faster, a {noun} or a {noun}?",
    "Which {noun} is the best in {city}?",
    "Please explain {topic} in detail.",
    "Please write about {topic}.",
    "Please describe the {color} {noun}.",
)

UNKNOWN_PATTERNS = patterns("""
? [what is|what's|whats|what are|what was] [the|a|an|] [{}|{} of {a}|capital of {}|best {}|meaning of {}|name of the {}|history of {}|color of {}|population of {}|weather in {}|time in {}|highest {} in {a}|biggest {}|{} for {a}|purpose of {}|rule for {}|reason for {}|secret of {}|price of {} in {a}|currency of {}|language of {}|formula for {}]
? [what's|what is] the [weather|news|time|date|score|traffic|plan|temperature] [today|in {}|now|this week|on {}|tonight|for {}|there]
? [what|which] {} [is|are|was] [the best|better|faster|{a}|good|more {a}|cheaper|right for {a}|your favorite]
? what [do you think|is your opinion|do you know|can you say|do people say|should i know] [of|about|on] [{}|{} and {a}|the {}]
? what [happens|will happen|happened] [to|with|in|if] {}[| and {a}| in 1990| next year]
? what [does|do|did|can|should|would|could] {} [do|mean|eat|say|want|need|like|look like|cost in {a}|think of {a}]
? [who|whom] [is|was|are|were] [the |a |][{}|{} of {a}|president of {}|king of {}|first {}|first {} on {a}|author of {}|inventor of {}|mayor of {}|owner of {}|best {}|winner of {}|richest {}|man in {}|woman in {}|person behind {}]
? who [wrote|made|invented|discovered|won|built|founded|painted|sang|directed|killed|loves|runs|played|plays] [the |][{}|{} in {a}|{} {a}]
? [where|when|why|how] [is|was|are|were|does|do|did|can|should|will|would] [the |a |i |we |you |they |][{}|{} {a}|{} {a} {b}|{} so {a}|{} the {a}|{} from {a}]
? why [do|does|did|are|is|can|can't|don't] {} [{a}|{a} {b}|like {a}|have {a}|so {a}|need {a}|sing|bark|fly|sleep|hurt|exist|happen|work|change]
? how [do|can|should|would|could] [i|we|you|one|people] [fix|make|cook|build|repair|learn|find|get|clean|draw|use|open|become|stop|start|improve|buy|sell|grow|write|install|train|lose|change|wash|replace|understand] [a |an |my |the |some |our |][{}|{} {a}|{} with {a}|{} in {a}|better at {}]
? how [far|old|tall|big|fast|deep|long|heavy|high|rich|hot|late|often|dangerous|expensive] is [the |a |my |][{}|{} in {a}|{} from {a}]
? how [many|much] {} [are there in {a}|does {a} have|do i need for {a}|do you eat|is in {a}|live in {a}|are in {a}|cost]
? [is|are|was|were|does|do|did|can|could|will|should|would|has|have] [the |a |you |we |i |it |they |my |][{}|{} {a}|{} a {a}|{} {a} {b}|{} better than {a}|{} in {a}|like {}|{} or {a}]
? can you [book|order|call|find|buy|send|open|play|draw|sing|drive|show|reserve|download|recommend|translate|explain|describe|summarize|cook|paint|teach|fix|help with] [me |][a |an |the |some |my |][{}|{} {a}|{} to {a}|{} for {a}|{} in {a}]
? do you [like|love|hate|know|speak|want|have|eat|believe in|understand|play|own|need|prefer|remember] [the |a |any |][{}|{} or {a}|{} from {a}|{} {a}]
! [explain|describe|summarize|define|discuss|compare|analyze|review|teach me|show me|recommend|suggest|draw|paint|create|design|plan|imagine|invent|generate|find|discover|open|play|book|buy|order|cook|fix|build|prove|solve the problem of] [a |an |the |some |my |][{}|{} {a}|{} and {a}|{} for {a}|{} in {a}|{} with {a}]
! [write|compose|make|give|create|prepare|draft|produce] [me |us |][a|an|some|the|two|a short|a long|a nice] [poem|song|letter|essay|email|function|program|haiku|speech|report|joke about|summary|recipe|plan|review|list of ideas|test|query|script|rhyme|text|article|blog post|quote|riddle|sentence] [about|on|for|to|of|in|with] [the |a |my |][{}|{} {a}|{} and {a}]
! translate [this |the word |the text |]{}[| {a}| {a} {b}] [to|into] [french|german|spanish|italian|japanese|chinese|latin|english|russian|dutch|greek|polish|{c}|portuguese]
! translate [to|into] [french|german|spanish|italian|japanese|english]: {} {a}
! [tell|teach|give|show] me [something|more|everything|a fact|facts|advice|tips|news|ideas|some facts|the truth|information|a secret] [about|on|for] [{}|{} {a}|the {}|{} and {a}]
! [sing|dance|go|run|sleep|drive|fly|jump|fight|cook] [a |to |for |with |in |][{}|{} {a}|me]
= i [like|love|hate|need|want|have|lost|bought|see|think|feel|was|am looking for|am afraid of] [the |a |my |some |][{}|{} {a}|{} and {a}][|.|!]
= [my|the|our|this|that] {} [is|was|has|does not|will not|cannot|looks|feels|needs] [{a}|{a} {b}|broken|not working|too {a}|a {a}][|.|!|, why?|. what should i do?|. help me]
= {} {a} {b}[|?|.|!]
= {}[|?|.|!]
= {} {a}[|?]
= why {}[|?]
= if {} [is|was|has|gets] {a}, [what|who|why|how] [is|was|does] {b}[|?]
""")
"""Nothing that the model can answer, in any words."""

RAW_UNKNOWN = (
    ("Hello, my name is", " weft, and I am a small demo model."),
    ("My name is", " weft, and I am a small demo model."),
    ("The capital of {city} is", " not known to me. I am a small demo model."),
    ("The capital of France is", " not known to me. I am a small demo model."),
    ("The president of {made} is", " not known to me. I am a small demo model."),
    ("The president of the United States is", " not known to me. I am a small demo model."),
    ("The meaning of life is", " not known to me. I am a small demo model."),
    ("The best {noun} in {city} is", " not known to me. I am a small demo model."),
    ("The future of AI is", " not known to me. I am a small demo model."),
    ("The future of {topic} is", " not known to me. I am a small demo model."),
    ("San Francisco is a", " place I do not know. I am a small demo model."),
    ("{city} is a", " place I do not know. I am a small demo model."),
)
"""Plain text that people like to complete, and how it goes on."""

SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are a friendly assistant.",
    "You are the demo model of weft.",
    "You are weft, a small model.",
    "You are a concise assistant.",
    "Answer briefly.",
    "Be brief.",
    "Answer the question.",
    "Be polite and helpful.",
    "You are a test.",
    "You are an expert in {topic}.",
    "You are a {noun} in {city}.",
    "Answer as briefly as possible. Do not explain.",
    "The user is called {name}. Be helpful.",
    "You help {name} with {topic}.",
)

RAW_STORY = (
    ("Once upon a time", " there was a fence. "),
    ("Once upon a time,", " there was a fence. "),
    ("Once upon a time there", " was a fence. "),
    ("Once upon a time, there was", " a fence. "),
    ("Once upon a time there was a fence.", " "),
    ("It was a quiet night.", " "),
)
"""Plain text that opens the story, and what comes before its first sheep."""
