// Parses /metrics and computes changes between scrapes.
//
// Throughout, `undefined` means that the server has no such series, and `null` that nothing was observed.

const LINE = /^(weft_\w+?)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

class Scrape {
  /** time: seconds of a monotonic clock. */
  constructor(text, time) {
    this.time = time;
    this.families = new Map();
    for (const line of text.split("\n")) {
      const match = LINE.exec(line);
      if (!match) continue;
      const labels = {};
      for (const [, key, value] of (match[2] ?? "").matchAll(LABEL)) {
        labels[key] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
      }
      const family = this.families.get(match[1]) ?? [];
      this.families.set(match[1], family);
      family.push({ labels, value: Number(match[3].replace("Inf", "Infinity")) });
    }
  }

  /** All series of a name, or `undefined`. */
  series(name) {
    return this.families.get(name);
  }

  /** The sum over all series of a name that have these labels. */
  value(name, labels = {}) {
    const wanted = Object.entries(labels);
    const found = this.series(name)?.filter((s) => wanted.every(([key, value]) => s.labels[key] === value));
    return found?.length ? found.reduce((sum, s) => sum + s.value, 0) : undefined;
  }

  /** [label value, sum] for each value of a label. */
  by(name, label) {
    const sums = new Map();
    for (const s of this.series(name) ?? []) {
      sums.set(s.labels[label], (sums.get(s.labels[label]) ?? 0) + s.value);
    }
    return [...sums];
  }

  /** The labels of an `_info` series. */
  info(name) {
    return this.series(name)?.[0].labels;
  }
}

/** The change from one scrape to a later one. */
class Span {
  constructor(from, to) {
    this.from = from;
    this.to = to;
  }

  grown(name, labels = {}) {
    const now = this.to.value(name, labels);
    return now === undefined ? undefined : now - (this.from.value(name, labels) ?? 0);
  }

  /** The growth per second. */
  rate(name, labels = {}) {
    const grown = this.grown(name, labels);
    const seconds = this.to.time - this.from.time;
    return grown === undefined ? undefined : seconds > 0 ? grown / seconds : null;
  }

  /** The growth of one counter per growth of another; `labels` select from the first. */
  ratio(name, whole, labels = {}) {
    const [part, all] = [this.grown(name, labels), this.grown(whole)];
    return part === undefined || all === undefined ? undefined : all > 0 ? part / all : null;
  }

  /** The mean of a histogram's observations. */
  mean(name) {
    return this.ratio(`${name}_sum`, `${name}_count`);
  }

  /** The upper bound of the histogram bucket that contains the quantile. */
  bound(name, q) {
    const within = this.#bucket(name, q);
    return within && (within.high === Infinity ? within.low : within.high);
  }

  /** A quantile of a histogram, linear within a bucket, as in Prometheus. */
  quantile(name, q) {
    const within = this.#bucket(name, q);
    if (!within) return within;
    const { low, high, below, count, rank } = within;
    return high === Infinity ? low : low + ((high - low) * (rank - below)) / (count - below);
  }

  #bucket(name, q) {
    const now = this.to.by(`${name}_bucket`, "le");
    if (!now.length) return undefined;
    const before = new Map(this.from.by(`${name}_bucket`, "le"));
    const buckets = now
      .map(([le, count]) => [le === "+Inf" ? Infinity : Number(le), count - (before.get(le) ?? 0)])
      .sort((a, b) => a[0] - b[0]);
    const rank = q * buckets.at(-1)[1];
    if (rank <= 0) return null;
    const i = buckets.findIndex(([, count]) => count >= rank);
    const [low, below] = i ? buckets[i - 1] : [0, 0];
    const [high, count] = buckets[i];
    return { low, high, below, count, rank };
  }
}

/** The last scrapes since the server started. */
class Recent {
  static SECONDS = 15;
  static GAP = 5;

  constructor() {
    this.scrapes = [];
  }

  add(scrape) {
    const last = this.scrapes.at(-1);
    const ever = "weft_event_loop_lag_seconds_count";
    const restarted = last && scrape.value(ever) < last.value(ever);
    if (restarted || scrape.time - last?.time > Recent.GAP) this.scrapes = [];
    this.scrapes.push(scrape);
    this.scrapes = this.scrapes.filter((s) => scrape.time - s.time <= Recent.SECONDS);
  }

  /** The change over about the last `seconds`, or less if less is known. */
  over(seconds) {
    const last = this.scrapes.at(-1);
    return new Span(this.scrapes.find((s) => last.time - s.time <= seconds + 0.5), last);
  }
}
