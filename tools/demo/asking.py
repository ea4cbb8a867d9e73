# ruff: noqa: E501
"""How people ask for sums, lists, letters and copies in words of their own: patterns for `wording.ask_for`."""

from weft.tools.demo.wording import patterns

SUM = patterns("""
? [what is|what's|whats|how much is|how much are|what are|what does|what will|what would] {a} [plus|+|and] {b}[| equal| make| together| be| come to| give| in total]
? [how much|what] [do|would] {a} and {b} [make|give|come to|add up to|sum to][| together]
? [what|how much] do [you|i|we] get [if|when] [you|i|we] add {b} [to|and] {a}
? what {a} [and|plus|+] {b} [is|makes|make|are|gives|comes to]
? what number is {b} [more than|greater than|larger than|bigger than|higher than|above|after] {a}
? [what is|what's] {b} [more than|added to|on top of|and] {a}
? [how many|how much] is {b} more than {a}
? if i have {a} {c} and [i |]get {b} more[ {c}|], how many [do i have|{c} do i have|{c} are there|is that]
? if [you|we|i] [add|put together|sum|combine] {a} and {b}, what [do you get|is it|is the result|comes out]
? there are {a} {c} and then {b} more [come|arrive|are added]. how many [are there|{c} are there|is that]
! [add|sum|sum up|add up|total|combine|add together] {a} [and|to|with|plus|&|,] {b}
! add {a} {b}
! [calculate|compute|work out|solve|evaluate|figure out|do] [|this: |the sum |the following: ]{a} [+|plus] {b}
! add [these|the|these two|the two|both] [numbers|numbers:|:|values:] {a}[,| and|, and| +] {b}
! [increase|raise] {a} by {b}
! [give|tell] me [the result of |the answer to |what you get for |]{a} [+|plus] {b}
: the [sum|total|result|outcome] of {a} and {b}
: [the sum of|the result of|the answer to|the value of|the total of|the solution of|] {a} [+|plus] {b}
: {a} [plus|+] {b}
: {b} [more than|on top of] {a}
= {a} [and|plus|+] {b} [is|makes|equals|makes what|is what|=|is how much|= ?|=?|is equal to|gives][|?]
= {a} [and|plus|added to|+] {b}[|?| please| pls]
= [sum|add|plus|math|sum of|q|total][:|] {a} [+|and|,] {b}
= {a}[ +|+| + |+ ]{b}[| = ?| =|=|=?| equals| is][|?]
= i [had|have|got|own|bought] {a} {c} and [then |][got|found|bought|was given|won|get] {b} more. [how many|how many {c}] [do i have|do i have now|have i got|is that|now][|?]
= my [bill|ticket|lunch|book|coffee] is {a} and the [tip|tax|drink|fee] is {b}[,|.] [what do i pay|how much do i pay|what is it|how much is that] [in all|in total|together|altogether|][|?]
""")

DIFFERENCE = patterns("""
? [what is|what's|whats|how much is|what does|what are|what would] {a} [minus|-|less|take away|without] {b}[| equal| make| be| give| leave]
? [what|how much] [is left|remains|is left over|do i have left] [if|when] [you|i|we] [take|remove|subtract|take away] {b} from {a}
? [what|how much] [is left|remains] of {a} [if|when|after] [you|i|we] [take|remove|subtract|take away|lose|spend] {b}
? if [you|i|we] [start with|begin with|have|had] {a} and [remove|lose|take away|take|give away|spend|subtract|drop|use] {b}, [what|how much] [remains|is left|do you have|is it|do i have|have i]
? [how far apart are|what is the difference between|what's the gap between|what is the distance between] {a} and {b}
? what number is {b} [less than|smaller than|lower than|below|under|before] {a}
? [what is|what's] {b} [less than|subtracted from|below|under|from|taken from] {a}
? how much [more|bigger|larger|greater] is {a} than {b}
? [how much|what] is the difference [of|between] {a} and {b}
! [subtract|take|remove|deduct] {b} [from|off|away from|out of] {a}
! [calculate|compute|work out|solve|evaluate|figure out|do] [|this: |the following: ]{a} [-|minus] {b}
! [decrease|lower|reduce] {a} by {b}
! take {a} and [subtract|remove|take away|take off] {b}
! [give|tell] me [the result of |the answer to |what you get for |]{a} [-|minus] {b}
: [the difference of|the difference between] {a} and {b}
: [the result of|the answer to|the value of|the solution of|] {a} [-|minus|less|take away] {b}
: {b} less than {a}
= {a} [minus|less|take away|-] {b} [is|makes|equals|leaves|is what|=|= ?|what's left|what is left|how much is left|leaves how much][|?]
= {a} [minus|less|take away|-] {b}[|, what's left|, what is left|, how much is left|, what remains][|?| please]
= [minus|math|difference|q][:|] {a} - {b}
= {a}[ -|-| - |- ]{b}[| = ?| =|=|=?| equals][|?]
= i [had|have|got|own] {a} {c} and [then |][spent|lost|gave away|ate|sold|used|dropped|paid] {b}[| of them]. [how many|how much|how many {c}] [are left|is left|do i have left|do i have now|do i have|remain|do i still have][|?]
= [there were|we had] {a} {c}[,| and] {b} [left|are gone|went away|got lost|were sold][.|,] how many [are left|remain|{c} are left|are there now][|?]
""")

PRODUCT = patterns("""
? [what is|what's|whats|how much is|how much are|what does|what would] {a} [times|x|*|multiplied by|multiplied with] {b}[| equal| make| be| give]
? what do [you|i|we] get [if|when] [you|i|we] multiply {a} [and|by|with|times] {b}
? [how much|how many] is {a} [lots of|groups of|times] {b}
? if [one|a] box [has|holds] {b} {c}, how many {c} [are in|do i have in|do|in] {a} boxes[| hold| have]
! multiply {a} [and|by|with|times] {b}
! multiply [these|the|the two] [numbers|numbers:|:] {a}[,| and] {b}
! [calculate|compute|work out|solve|evaluate|figure out|do] [|this: ]{a} [x|times|*] {b}
: the [product|result of multiplying|result of the multiplication] of {a} and {b}
: [the product of|the result of|the answer to|] {a} [*|times|x] {b}
: {a} times {b}
= {a}[ * | x |*|x| × | times ]{b}[| = ?| =|=|=?| equals| is][|?]
= [times|product|multiply|math][:|] {a} [x|*|times|and] {b}
""")

DOUBLE = patterns("""
! double [|the number |of ]{a}
? [what is|what's|whats] [double|twice|two times|double of|2 times|the double of] {a}
: [twice|double|the double of|two times] {a}
= [twice|double|2 x|2 *] {a}[|?]
""")

HALF = patterns("""
! halve [|the number ]{a}
? [what is|what's|whats|how much is] [half of|half|one half of|the half of] {a}
: half of {a}
= half of {a}[|?]
""")

THREE = patterns("""
? [what is|what's|whats|how much is|how much are|what does] {}[| in total| together| make| equal]
? what do {} [add up to|make|sum to|come to|give][| together| in total]
? what do [you|i|we] get if [you|i|we] add {}
? [what's|what is|whats] the [sum|total] of {}
! [add|sum|sum up|add up|total|add together][|:| the numbers| these numbers:| these:| this up:] {}
! [calculate|compute|work out|solve] [|the sum of ]{}
: the [sum|total] of {}
= {}[|=| =| = ?|?]
= [sum|total|add|add up|sum of][:|] {}
""")
"""Three numbers, written as `a + b + c` or as a list."""

FOLLOW = {
    "+": patterns("""
! add {a}[| to that| to it| to the result| to this| to the answer| to that number| more| again| on top| now| to the last one| to your answer]
! increase [it|that|the result|this] by {a}
! [put|add] [another |]{a} [more on top|on top|more|to it|on it]
! add {a} [back|back to it|to that]
? [what is|what's|whats|how much is|what about|and what is|how about] [that|it|this|the result|the answer|the sum|the last result|the previous answer] [plus|+|and] {a}
? [what is|what's|whats|what about|so what is] {a} more[| than that| than it]
? what if [you|i|we] add {a}[| to that| to it| back| more]
? and [if|when] [you|i|we] add {a}[| to that| to it| again|, what is it]
= [and|ok|then|now|great,|] [plus|+] {a}[|?]
= [and|ok and|] {a} more[|?]
= [and|] the [result|answer|last answer|previous answer|sum] [plus|+] {a}[|?]
= [it|that] plus {a}[|?]
= + {a}
= +{a}
"""),
    "-": patterns("""
! [subtract|take|remove|deduct] {a}[| from that| from it| from the result| from this| away| off| from the answer| from your answer| again| off it| away from that| now]
! [take off|take away|remove|drop] {a}[| from it| from that| again| now]
! [decrease|lower|reduce] [it|that|the result|this] by {a}
? [what is|what's|whats|how much is|what about|and what is|how about] [that|it|this|the result|the answer|the last result|the previous answer] [minus|-|less|take away] {a}
? [what is|what's|whats|what about|so what is] {a} less[| than that| than it]
? what if [you|i|we] [subtract|take away|take|remove] {a}[| from that| from it]
? and [if|when] [you|i|we] [subtract|take away|take|remove|lose] {a}[| from that| from it| again|, what is it| of it]
= [and|ok|then|now|great,|] [minus|-|take away|less] {a}[|?]
= [and|ok and|] {a} less[|?]
= [and|] the [result|answer|last answer|previous answer] [minus|-] {a}[|?]
= [it|that] minus {a}[|?]
= - {a}
= -{a}
"""),
    "*": patterns("""
! multiply [|that |it |the result |this |the answer ][by|with|times] {a}
! times {a}
? [what is|what's|whats|how much is|what about|how about] [that|it|this|the result|the answer] [times|x|*|multiplied by] {a}
? what if [you|i|we] multiply [it|that] by {a}
= [and|ok|then|now|] [times|x|*|multiplied by] {a}[|?]
= [and|] the [result|answer] times {a}[|?]
"""),
    "2": patterns("""
! double [that|it|the result|this|the answer|that number]
? [what is|what's|whats] [twice|double|two times] [that|it|as much|the result]
? what if [you|i|we] double [it|that]
= [and|ok|then|now|] [double|twice|doubled|two times] [that|it|the result][|?]
"""),
    "1": patterns("""
! add one[| to that| to it| more| to the result]
= [and|] one more[|?]
= [and|ok|now|] plus one[|?]
"""),
}

SORT = patterns("""
! [sort|order|arrange|rank|put in order|organize][|:| these:| this:| the following:| these items:| this list:| the list| the items] {}
! [sort|order|arrange] [the|these|my|all] {b}[|:] {}
! [sort|arrange|order] [|the words |these words: |the {b} |these {b}: ]{} [alphabetically|by alphabet|in alphabetical order|from a to z|by name]
! [put|bring|get] {} [in|into] [order|alphabetical order|the right order|sorted order]
! [put|arrange|list|write|give me][| the| these| these words| the words| these names| these {b}] in [alphabetical|alphabetic|abc|dictionary] order[|:] {}
! [alphabetize|alphabetise|sort alphabetically|sort by alphabet|order alphabetically|arrange alphabetically|sort a to z][|:| the words| this:| these words:| the {b}] {}
! [sort|order|arrange] this list for me: {}
! give me {} [sorted|in order|in alphabetical order|alphabetically]
! give me this list sorted: {}
? [what is|what's|whats] the [sorted|alphabetical|right|correct] [order|order of|list of|list for][|:] {}
? which order do these go in[| alphabetically]: {}
? how [would you|do you|do i] [sort|order|arrange][|:| these:] {}
? [which comes first, and then: |what is the order of ]{}
: the [sorted list of|sorted version of|right order of|alphabetical order of] {}
= {}[:| -|.|,| =] [sort these|sort them|please sort|sort|sorted please|in order please|alphabetical order please|sort it|can you sort these|put them in order|sort alphabetically|in abc order][|.|?|!]
= [sorted|in order|alphabetically|alphabetical|abc order|a to z]: {}
= i have {}. [sort|order|please sort|arrange] [them|the words|the {b}|these|the list|that][|.| for me.| alphabetically.]
""")

ASCENDING = patterns("""
! [sort|order|arrange|rank|put in order][|:| these:| these numbers:| the numbers| this:| numbers:| these values:| the list] {}
! [sort|order|arrange|rank|list][|:| these:| these numbers:| the numbers] {} [ascending|in ascending order|from small to large|from smallest to largest|from low to high|from lowest to highest|smallest first|from small to big|from least to greatest|by size|in increasing order|numerically|upwards|lowest first]
! [sort|order|arrange|list|put][| the numbers| these numbers| these| numbers] [ascending|in ascending order|from small to large|from smallest to largest|from low to high|smallest first|from smallest to biggest|in increasing order|by size|in numerical order|lowest first][:|] {}
! [arrange|list|put|write] in [ascending|increasing|numerical|rising] order[:|] {}
! put {} in [order|ascending order|the right order|numerical order]
! give me {} [sorted|in order|in ascending order]
? [what is|what's|whats] the [sorted|right|correct|ascending] order of[|:] {}
? how do i [sort|order][|:] {}
= [from|] [small to large|smallest to largest|lowest to highest|low to high|small to big|least to greatest|smallest to biggest]: {}
= {}[:| -|.|,] [sort these|sort them|please sort|sorted please|in order please|sort it|can you sort these|ascending please|smallest first][|.|?]
= [sorted|in order|ascending|sort ascending|sort asc|sort up]: {}
""")

DESCENDING = patterns("""
! [sort|order|arrange|rank|list][|:| these:| these numbers:| the numbers] {} [descending|in descending order|from large to small|from largest to smallest|from high to low|from highest to lowest|biggest first|from big to small|from biggest to smallest|in decreasing order|highest first|downwards|largest first]
! [sort|order|arrange|list|put][| the numbers| these numbers| these| numbers] [descending|in descending order|from large to small|from largest to smallest|from high to low|biggest first|from biggest to smallest|in decreasing order|highest first|largest first|from highest to lowest][:|] {}
! [arrange|list|put|write] in [descending|decreasing|falling] order[:|] {}
= [from|] [large to small|largest to smallest|highest to lowest|high to low|big to small|biggest to smallest|greatest to least]: {}
= {}[:| -|.|,] [sort descending|biggest first|highest to lowest|descending please|largest first][|.|?]
= [descending|sort descending|sort desc|sort down]: {}
""")

REVERSE = patterns("""
! [reverse|flip|invert|turn around|swap][|:| the list| this list:| this:| the order of| the order of:| these:| the following:| the order in| the items| the order of these words:| these words:] {}
! [reverse|flip|invert] the [list|order|sequence|words|{b}][|:] {}
! [give|tell|show|write|read|list|say|print] me [these|this list|the list|them|the words] [backwards|in reverse|in reverse order|from last to first|in the opposite order|from the end|from back to front|the other way around]: {}
! [say|write|list|read|give me|put|type][| these| this| this list| the list| the words| it| all] [backwards|in reverse|in reverse order|from last to first|in the opposite order|from the end|from back to front|the other way around|starting from the end|from end to start|last to first]: {}
! [say|write|list|read|give me|put|show me] {} [backwards|in reverse|in reverse order|from last to first|in the opposite order|from the end|from back to front|the other way around|last one first]
! turn {} around
! turn [this|the] list around: {}
? [what is|what's|whats] {} [backwards|in reverse|in reverse order|reversed|from the end|the other way around|from back to front]
? how [does|would] {} [look|read|go|sound] [backwards|in reverse|reversed|in reverse order]
: the [reverse|reverse order|reversed list|opposite order] of {}
: {} [reversed|in reverse|backwards|in reverse order]
= {}[:| -|.|,|] [reverse these|reverse them|please reverse|reversed please|reverse it|backwards please|in reverse|in reverse please|can you reverse these|now backwards|reversed|the other way around|from the end|in reverse order][|.|?]
= [reversed|in reverse|backwards|reverse order|last to first|from last to first|from the end|the other way around][:|, please:| please:] {}
= i have {}. [reverse|flip|turn around] [them|the order|the list|the words][|.]
""")

COUNT = patterns("""
? how many [words|items|things|elements|entries|{b}] [are|do you see|are there|do i have|have i got] in [this list|my list|the list|here|this|the following|the following list][:|?] {}
? how many [words|items|things|elements|entries|{b}] [are there|are these|are here|is this|is that|do you see|do i have|did i write|did i list|are listed|do you count|are in this|have i][:|?] {}
? how many [words|items|things|elements|{b}] does [this list|the list|my list|this] [have|contain|hold][:|?] {}
? how many is this: {}
? how long is [this list|the list|my list]: {}
? [what is|what's|whats] the [number|count|amount] of [words|items|things|elements|{b}] [in|here|in this list|in my list|in the list][:|] {}
! count [these|the|these words|these items|the words|the items|the things|these things|the elements|everything|all words|all items|all|my things|the {b}|these {b}|how many {b} are here|how many words are here|what is here][| here| in this list| for me| in this| in here][:|] {}
! [tell|show] me how many [words|items|things|{b}] [these are|this is|there are|i have|are here|you see|are in this list]: {}
: the [number|count|length] of [words in|items in|things in|this list:|the list|elements in|{b} in] {}
= {}[:| -|.|,] [how many|how many is that|how many words|how many items|how many are there|how many {b}|count them|count these|how many {b} is that|how many things are that|how many are these|number of words|how many words is that][|?]
= [count|number|number of items|number of words|how many][:|] {}
= i [have|see|bought|found|need|got|own|want] {}. how many [{b}|things|items|words] [is that|are that|are there|do i have|is it|are they|did i list|do i see][|?]
""")

UPPER = patterns("""
! [write|put|type|make|say|print|give me|show me|convert|turn|change|set][| this| these| the words| it| the text| the following| these words] [in|into|to|in all] [upper case|uppercase|capitals|capital letters|caps|big letters|all caps|upper case letters|block letters][:|] {}
! [write|put|type|say|print|convert|turn|change] {} [in|into|to] [upper case|uppercase|capitals|capital letters|all caps|caps|big letters|all capitals]
! make [this|it|these|these words|the following|the text|this text|that] [uppercase|upper case|all caps|capitals|big][:|] {}
! make {} [uppercase|upper case|all caps|big]
! [uppercase|upper-case|capitalize|capitalise|shout|yell|scream|upper][|:| this:| the word| the words| these words:| the text:| it:| everything:| all of this:] {}
! use [capital letters|capitals|all caps|upper case] for[|:] {}
! give me {} in [capital letters|capitals|all caps|upper case|uppercase]
? [what is|what's|whats|how do you write|how do i write|how does one write|how would you write] {} in [upper case|uppercase|capitals|capital letters|all caps|big letters|caps]
? [what is|what's] the [upper case|uppercase] [of|form of|version of] {}
: the [upper case|uppercase|upper-case|capital|all caps] [of|form of|version of] {}
: {} [in capital letters|in capitals|in all caps|in upper case|in uppercase|uppercased|in caps]
= [upper case|uppercase|all caps|caps|capitals|in capitals|big letters|in caps|upper][:|, please:| please:| for:| now:] {}
= {}[:| -|.|,] [in upper case please|uppercase please|in capitals|make it uppercase|all caps please|make it big|in all caps][|.]
= i [want|need|would like|'d like] {} in [capital letters|capitals|all caps|upper case|uppercase|big letters][|.]
""")

FIRST = patterns("""
? [what is|what's|whats|which is|which one is] the first [word|item|one|thing|entry|element] [in|of|here in|in the list|of the list|of this list|here|in this list][:|] {}
? [which|what] [word|item|one] comes first[ in|:| here:] {}
! [give|tell|show] me the first [word|item|one|entry|element|thing][| of this list| in this list| in| of| here][:|] {}
: the first [word|item|one|entry|element][| of this list| in this list| in| of| of the list][:|] {}
= first [word|item|one|entry][| of this list| of| in][| please]: {}
""")
LAST = patterns("""
? [what is|what's|whats|which is|which one is] the [last|final] [word|item|one|thing|entry|element] [in|of|here in|in the list|of the list|of this list|here|in this list][:|] {}
? [which|what] [word|item|one] comes last[ in|:| here:] {}
! [give|tell|show] me the [last|final] [word|item|one|entry|element|thing][| of this list| in this list| in| of| here][:|] {}
: the [last|final] [word|item|one|entry|element][| of this list| in this list| in| of| of the list][:|] {}
= last [word|item|one|entry][| of this list| of| in][| please]: {}
""")

LARGEST = patterns("""
? [what is|what's|whats|which is|which one is|which number is|which of these is|which of these numbers is] the [largest|biggest|highest|greatest|maximum|max][| number| one| value] [of|in|here in|among|here|in this list|of the numbers|out of][:|] {}
? which [of these |one |number |]is the [largest|biggest|highest|greatest]: {}
? which [number|one] is [bigger|larger|higher|greater|more], {a} or {b}
? [is|which is|what is] [bigger|larger|higher|greater|more][,|:|] {a} or {b}
? is {a} or {b} [bigger|larger|higher|greater|more]
! [find|give me|tell me|pick|show me|choose|name|return] the [largest|biggest|highest|greatest|maximum|max][| number| one| value][ of| in| among| from|:| here:| of these:] {}
: the [largest|biggest|highest|greatest|maximum|max][| number| value][ of| in| among|:] {}
= [max|maximum|largest|biggest|highest|greatest][| number| of| in| out of| value][:|] {}
= {}[:| -|.|,] which is [the biggest|the largest|biggest|largest|the highest|the greatest][|?]
""")
SMALLEST = patterns("""
? [what is|what's|whats|which is|which one is|which number is|which of these is|which of these numbers is] the [smallest|lowest|least|minimum|min|littlest][| number| one| value] [of|in|here in|among|here|in this list|of the numbers|out of][:|] {}
? which [of these |one |number |]is the [smallest|lowest|least]: {}
? which [number|one] is [smaller|lower|less], {a} or {b}
? [is|which is|what is] [smaller|lower|less][,|:|] {a} or {b}
? is {a} or {b} [smaller|lower|less]
! [find|give me|tell me|pick|show me|choose|name|return] the [smallest|lowest|least|minimum|min][| number| one| value][ of| in| among| from|:| here:| of these:] {}
: the [smallest|lowest|minimum|min][| number| value][ of| in| among|:] {}
= [min|minimum|smallest|lowest|least][| number| of| in| out of| value][:|] {}
= {}[:| -|.|,] which is [the smallest|the lowest|smallest|lowest|the least][|?]
""")

SPELL = patterns("""
! spell[| the word| out| the name| this word:| out the word| this:| for me:|:] {}
! spell {} [for me|letter by letter|out|slowly|in letters]
! [write|say|list|give me|show me|tell me][| all| each of] the letters [of|in][| the word] {}[| one by one]
! [write|split|break|separate] {} [letter by letter|into letters|into its letters|into single letters]
? how [do you|do i|is|would you|does one|do people|to|can i] spell[|ed] [|the word ]{}
? how is [|the word |the name ]{} [spelled|spelt|written]
? [what is|what's] the spelling of [|the word ]{}
? [which|what] letters [are in|make up|does] {}[| have| contain]
: the [letters of|spelling of|letters in] [|the word ]{}
= [spelling|letters|letters of|spell][:|] {}
= {}[:| -|.|,] [spell it|spell this|please spell it|can you spell it|letter by letter please][|.|?]
""")

BACKWARDS = patterns("""
! [spell|say|write|type|read|print|give me|tell me|show me][| the word| this word| the name| this] {} [backwards|backward|in reverse|from back to front|from the end|reversed|the other way around]
! [spell|write|say|type|read][| this| the word| it| this word| this text] [backwards|backward|in reverse|reversed][:|] {}
! [reverse|flip|invert|mirror][|:| the word| this word:| the letters of| the letters in| the string| this string:| this:| the text| the letters of the word| the characters of| the spelling of| this text:| the name] {}
! turn [the word |]{} around
? [what is|what's|whats|how is|how does|how do you spell|how do you write|how would you write|what would|how do you say] [|the word ]{} [backwards|backward|spelled backwards|in reverse|reversed|from the end|spelled in reverse|written backwards]
? how does {} [look|read|sound] [backwards|in reverse|reversed]
? [what is|what's] the [reverse|mirror image|reversal] of {}
: the [reverse|reversed form|reversal|reversed word|reversed spelling] of {}
: {} [spelled backwards|backwards|reversed|in reverse|written backwards]
= {} [backwards|reversed|in reverse|backwards please|but backwards][|?]
= [backwards|reversed|reverse|in reverse|mirror|reverse word|reverse string|reverse text][:|] {}
""")

LETTER_COUNT = patterns("""
? how many [letters|characters] [are in|does|are there in|has|do you see in|has got] [|the word |the name ]{}[| have| contain]
? how many [letters|characters] [is|are in] [the word |]{}
? how long is [the word|the name|the string] {}
? [what is|what's] the [length|number of letters] [of|in] [|the word |the name ]{}
! count [the|all|all the] [letters|characters] [in|of] [|the word ]{}
! tell me how many letters {} has
: the [number of letters|number of characters|letter count|length] [of|in] [|the word ]{}
= [number of letters|letter count|how many letters|length][| in| of][:|] {}
= {}[:| -|.|,] how many letters[| is that| are there][|?]
""")
FIRST_LETTER = patterns("""
? [what is|what's|whats|which is] the first [letter|character] [of|in] [|the word |the name ]{}
? [which|what] letter does {} [start|begin] with
? what does {} [start|begin] with
! [give|tell] me the first [letter|character] [of|in] [|the word ]{}
: the first [letter|character] [of|in] [|the word ]{}
= first letter of {}[|?]
""")
LAST_LETTER = patterns("""
? [what is|what's|whats|which is] the [last|final] [letter|character] [of|in] [|the word |the name ]{}
? [which|what] letter does {} end with
? what does {} end with
! [give|tell] me the [last|final] [letter|character] [of|in] [|the word ]{}
: the last [letter|character] [of|in] [|the word ]{}
= last letter of {}[|?]
""")

REPEAT = patterns("""
! [repeat|copy|echo|say|write|type|print|output|return|quote|parrot|tell me|send|give me|give back|send back|respond with|answer with|reply with|read out|show me|spit out|produce][|:| this:| this| the following:| the words:| the words| the text:| the following text:| this text:| the phrase| the line:| this line:| these words:| exactly:| exactly this:| only this:| just this:| this and nothing else:| this again:| the sentence:| the message:| this message:| this sentence:| after me:| the code| this code:| this number:| the number| the string| this string:| this word:| the word| this exactly:| it exactly:| the exact text:] {}
! [repeat|copy|echo|say|write|type|print|output|read|send|give] [it|this|that|the following|this text|this line] [back|back to me|again|once more|one more time|to me|word for word|down again|exactly|as it is|unchanged|for me|without changes|down|out loud|out|back exactly][:|] {}
! [repeat|say|write|type|copy] [after me|what i say|what i write|exactly what i write|my words|what i type|exactly what i say|what follows|the next words|the next line|the following words|the following line][:|] {}
! say to me: {}
! tell me again: {}
? [what did i say|what do i say|how do i say this]: {}
= [repeat|copy|echo|say|parrot|again|after me|repeat after me|say after me|exactly|word for word|copy that|repeat that|say it|your turn|read back|read this back|output|print|copy paste|type|quote][:| this:|, please:| please:] {}
= [repeat|echo|copy|say] {}
= [repeat after me|say after me|say exactly|repeat exactly|please repeat|please say|now say|just say|say|repeat|write|copy] {}
= i [want|would like|'d like|need] you to [say|repeat|write|type|copy|echo][|:| this:| after me:| the words:| exactly:] {}
= can you [repeat|say|copy|echo|type|write][| this| the text| this code| this number| this line| the following][?|:] {}
= [i say|the text is|my text|text|here it is|listen|my message]: {}\\n[repeat it|now repeat it|say it back|copy it|repeat that|echo it|say that again][.|]
""")

COUNT_DOWN = patterns("""
! count [down|back|backward|backwards|in reverse|downwards|downward] from {a} to {b}
! count from {a} [down to|back to|backwards to|backward to|downwards to] {b}
! count [down|back|backwards] {a} to {b}
! start [at|from|with] {a} and [count|go] [down|back|backwards|downwards] to {b}
! go [from {a} down to {b}|from {a} back to {b}|down from {a} to {b}|back from {a} to {b}|backwards from {a} to {b}]
! [list|write|say|give me|tell me|show me|print][| all| every] [the numbers|numbers|the numbers counting down] from {a} [down|back] to {b}
! [list|write|say|give me] the numbers from {b} to {a} [backwards|in reverse|in reverse order|in descending order]
! do a countdown from {a} to {b}
: [a countdown|the countdown] from {a} to {b}
= [countdown|count down|count back|backwards][:|] {a} to {b}
= from {a} [down|back] to {b}
""")
"""{a} is the higher number."""
COUNT_DOWN_TO_ONE = patterns("""
! count [down|back|backward|backwards|downwards|in reverse] from {a}
! count [down|backwards|back] [starting|beginning] [at|from|with] {a}
! start [at|from|with] {a} and count [down|backwards|back]
! [do|start|give me|make|write] a countdown from {a}
= [countdown|a countdown|count down][:|] [from |]{a}
""")
COUNT_UP = patterns("""
! count [|up |upwards |forward ]from {a} [to|up to|until|till|through] {b}
! count[:|] {a} to {b}
! count {a} [to|through|until] {b}
! start [at|from|with] {a} and [count|go] [up |on |]to {b}
! go from {a} [up |on |]to {b}
! [list|write|say|give me|tell me|show me|print|name][| all| every| out] [the numbers|numbers|number|the integers|integers] from {a} [to|up to|through|until] {b}[| inclusive|, inclusive]
! [list|write|say|give me|show me][| all| all the| the] numbers between {a} and {b}[ inclusive|, inclusive|, both included|, both inclusive| including both]
? [what|which] [are the|] numbers [come |]from {a} to {b}
? what are the numbers [from {a} to {b}|between {a} and {b} inclusive|between {a} and {b}, inclusive]
: [the numbers|numbers|all numbers] from {a} [to|up to] {b}
= [numbers|the numbers|count|all numbers|numbers from] {a} [to|through|up to] {b}
= from {a} to {b}
""")
COUNT_TO = patterns("""
! count [to|up to|until|till|all the way to|all the way up to] {b}
! count [|up ][from one|from 1|starting at 1|starting from one] to {b}

= count [to|up to] {b}
""")
