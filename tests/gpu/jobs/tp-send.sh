# seconds 130
# gpus 2
# asks: what products that send their partial sums win from end to end: an 8B on two, 1024/512 x 300, by turns with them
#   and without (on, off, on, off): tokens/s, W of both, MHz, tokens/J -> 1-on.json, 2-off.json, …; sums.json has what the
#   start measured and chose. In bursts of pairs they won up to 8 % (BENCHMARKS.md, "Products that send their partial
#   sums", where this goes). "On" is what the start chose, or, where it chose none that sends, two steps from 128 tokens
#   on. Off as quick as on, within the spread: docs say so, and the choice needs a margin larger than 3 %.
exec python tests/gpu/jobs/send_by_turns.py llama-3-8b 1024:512:300 on off on off
