// The dashboard, and the poller that updates it. Tiles without a metric are hidden.

const PERIOD = 1; // seconds between polls of /metrics
const SLOW = 5; // seconds between polls of /ready, unless the engine started or ended
const PATIENCE = 10; // longest period while the server does not answer

const $ = (id) => document.getElementById(id);

// The mean is exact. A percentile is only known by its bucket, so the figure is that bucket's upper bound.
const mean = (name) => ({ name: "mean", value: ({ long }) => long.mean(name) });
const p = (q, name) => ({ name: `p${q * 100} ≤`, value: ({ long }) => long.bound(name, q) });
const latency = (title, name, note) => ({
  title,
  note: `${note}, measured by the server`,
  format: seconds,
  lines: [mean(name), p(0.99, name)],
});

const OVERVIEW = [
  {
    title: "Throughput",
    note: "Tokens per second over the last three seconds",
    format: per("tok/s"),
    lines: [
      { name: "output", value: ({ short }) => short.rate("weft_generation_tokens_total") },
      { name: "prompt", value: ({ short }) => short.rate("weft_prompt_tokens_total") },
    ],
  },
  latency("Time to first token", "weft_time_to_first_token_seconds", "Arrival to first token, over the last ten seconds"),
  latency("Inter-token latency", "weft_inter_token_latency_seconds", "Gaps between tokens, over the last ten seconds"),
  {
    title: "Sequences",
    format: count,
    lines: [
      { name: "running", value: ({ now }) => now.value("weft_requests_running") },
      { name: "waiting", value: ({ now }) => now.value("weft_requests_waiting") },
    ],
  },
  {
    title: "KV cache",
    note: "Pages held by sequences, and pages in use including cached prefixes",
    format: percent,
    top: 1,
    lines: [
      { name: "held", value: ({ now }) => now.value("weft_kv_cache_usage_ratio") },
      { name: "used", value: ({ now }) => used(now, "gpu") },
    ],
  },
  latency("Request latency", "weft_request_latency_seconds", "Arrival to last token, over the last ten seconds"),
];

const INTERNALS = [
  {
    title: "Sequence limit",
    note: "As adjusted by --max-num-seqs auto",
    format: count,
    lines: [{ name: "limit", value: ({ now }) => sequenceLimit(now) }],
  },
  {
    title: "Iteration time",
    format: seconds,
    lines: [
      mean("weft_iteration_seconds"),
      p(0.99, "weft_iteration_seconds"),
    ],
  },
  {
    title: "Dense batch fill",
    note: "Tokens per iteration / the token limit",
    format: percent,
    top: 1,
    lines: [{ name: "mean", value: ({ now, long }) => fill(long.mean("weft_iteration_tokens"), now) }],
  },
  {
    title: "Tokens per iteration",
    format: count,
    lines: ["decode", "prefill"].map((phase) => ({
      name: phase,
      value: ({ long }) => long.ratio("weft_computed_tokens_total", "weft_iterations_total", { phase }),
    })),
  },
  {
    title: "Device idle",
    note: "Share of time with requests open and the device idle",
    format: percent,
    top: 1,
    lines: [{ name: "idle", value: ({ long }) => long.rate("weft_device_idle_seconds_total") }],
  },
  {
    title: "Prefix cache hits",
    note: "Share of prompt tokens found in the cache, over the last ten seconds",
    format: percent,
    top: 1,
    lines: [
      {
        name: "hits",
        value: ({ long }) => long.ratio("weft_prefix_cache_hit_tokens_total", "weft_prefix_cache_queried_tokens_total"),
      },
    ],
  },
  {
    title: "Queue time",
    format: seconds,
    lines: [mean("weft_queue_time_seconds"), p(0.99, "weft_queue_time_seconds")],
  },
  {
    title: "Scheduler",
    note: "CPU time per iteration to schedule and commit",
    format: seconds,
    lines: [mean("weft_schedule_seconds")],
  },
  {
    title: "Event loop lag",
    note: "Delay of timers in the API processes",
    format: seconds,
    lines: [mean("weft_event_loop_lag_seconds"), p(0.99, "weft_event_loop_lag_seconds")],
  },
];

/** The sequence limit, or `undefined` if it never changed. */
function sequenceLimit(scrape) {
  const moved = scrape.by("weft_max_num_seqs_changes_total", "reason").some(([, times]) => times > 0);
  return moved ? scrape.value("weft_max_num_seqs_now") : undefined;
}

/** The share of the dense batch that these tokens fill. */
function fill(tokens, scrape) {
  const most = scrape.value("weft_max_iteration_tokens");
  return typeof tokens === "number" && most !== undefined ? tokens / most : most && tokens;
}

/** The share of a tier's pages in use. */
function used(scrape, tier) {
  const [pages, capacity] = ["used", "capacity"].map((x) => scrape.value(`weft_kv_tier_${x}_pages`, { tier }));
  return capacity > 0 ? pages / capacity : undefined;
}

/** Totals by label, without zeros. Growing totals are colored. */
const TOTALS = [
  ["Iterations by plan", "weft_iterations_total", "plan"],
  ["Attention", "weft_attention_iterations_total", "path"],
  ["Split attention", "weft_attention_cut_iterations_total", "what"],
  ["Prefill limited by", "weft_prompts_cut_total", "by"],
  ["Sequence limit changed", "weft_max_num_seqs_changes_total", "reason"],
  ["Finished", "weft_finished_total", "reason"],
  ["Rejected", "weft_rejected_total", "reason"],
  ["Aborted", "weft_aborted_total", "cause"],
];
const EVENTS = [
  ["Preemptions", "weft_preemptions_total"],
  ["Engine restarts", "weft_engine_restarts_total"],
  ["API process restarts", "weft_api_process_restarts_total"],
];

class Dashboard {
  constructor() {
    this.recent = new Recent();
    this.make(OVERVIEW, $("overview"));
    this.make(INTERNALS, $("internals"));
    Chart.point = (age) => {
      Chart.age = age;
      this.draw();
    };
  }

  charts = [];

  make(descriptions, into) {
    const charts = descriptions.map((description) => new Chart(description));
    into.append(...charts.map((chart) => chart.node));
    this.charts.push(...charts);
  }

  take(scrape) {
    this.recent.add(scrape);
    this.begun ??= scrape.time;
    Chart.span = Math.min(LONGEST, Math.max(SHORTEST, scrape.time - this.begun));
    const sample = { now: scrape, short: this.recent.over(3), long: this.recent.over(10) };
    for (const chart of this.charts) chart.add(scrape.time, sample);
    $("engine").hidden = [...$("internals").children].every((tile) => tile.hidden);
    this.draw();
    this.facts(scrape);
    refill($("tiers").querySelector("tbody"), this.tiers(sample));
    refill($("totals"), this.totals(sample));
    $("tiers").hidden = !$("tiers").querySelector("tbody").childElementCount;
    $("totals").hidden = !$("totals").childElementCount;
  }

  draw() {
    const last = this.recent.scrapes.at(-1);
    if (last) for (const chart of this.charts) chart.draw(last.time);
    $("clock").textContent = Chart.age === null ? `Last ${Math.round(Chart.span)} s` : `${Chart.age} s ago`;
  }

  facts(scrape) {
    const build = scrape.info("weft_build_info");
    if (build) {
      const names = modelStates(scrape).map(({ labels }) => labels.model_name);
      const name = names.length > 1 ? names.join(", ") : build.model;
      $("model").textContent = name;
      document.title = `${name} · weft`;
      $("version").textContent = `weft ${build.version}`;
    }
    const cache = scrape.info("weft_cache_config_info");
    const facts = [
      build && `${build.dtype} on ${build.device}`,
      models.context && `${whole(models.context)} tokens of context`,
      cache && `KV for ${text(count(cache.num_pages * cache.page_size))} tokens`,
    ];
    $("facts").textContent = facts.filter(Boolean).join(" · ");
  }

  tiers({ now, long }) {
    const tiers = now.series("weft_kv_tier_capacity_pages") ?? [];
    return tiers
      .filter((capacity) => capacity.value > 0)
      .map(({ labels: { tier }, value: capacity }) => {
        const share = used(now, tier);
        const total = (what) => text(count(now.value(`weft_${what}_total`, { tier })));
        const rate = (way) => `${text(bytes(long.rate(`weft_kv_tier_bytes_${way}_total`, { tier })))}/s`;
        const off = now.value("weft_kv_tier_up", { tier }) === 0 ? [element("em", {}, " off")] : [];
        const bar = element("span", { className: "bar-fill" });
        bar.style.width = `${share * 100}%`;
        const cells = [
          [element("span", { className: "bar-track" }, bar), text(percent(share))],
          [whole(capacity)],
          [total("prefix_cache_hit_tokens")],
          [tier === "gpu" ? "–" : `${rate("in")} · ${rate("out")}`],
          [total("kv_tier_evictions")],
          [total("kv_tier_failures")],
        ];
        return element(
          "tr",
          {},
          element("th", { scope: "row" }, tier === "gpu" ? "device" : tier, ...off),
          ...cells.map((cell) => element("td", {}, ...cell)),
        );
      });
  }

  totals({ now, long }) {
    const rows = [];
    const row = (title, chips) => chips.length && rows.push(element("dt", {}, title), element("dd", {}, ...chips));
    const found = modelStates(now);
    if (found.length > 1 || found.some(({ labels }) => labels.state !== "awake")) {
      row("Models", found.map(({ labels: { model_name, state } }) => fact(model_name, state, state === "awake")));
    }
    if (now.series("weft_requests_queued")) {
      const queue = now.by("weft_requests_queued", "reason").filter(([, waiting]) => waiting > 0);
      row("Waiting for", queue.length ? queue.map(([reason, waiting]) => chip(waiting, reason, true)) : ["nothing"]);
    }
    for (const [title, name, label] of TOTALS) {
      const parts = now.by(name, label).filter(([, total]) => total > 0);
      row(title, parts.map(([part, total]) => chip(total, part, long.grown(name, { [label]: part }) > 0)));
    }
    for (const [title, name] of EVENTS) {
      if (now.value(name) > 0) row(title, [chip(now.value(name), "", long.grown(name) > 0)]);
    }
    return rows;
  }
}

/** The current state of each model, one sample per model. */
function modelStates(scrape) {
  return (scrape.series("weft_model_state") ?? []).filter(({ value }) => value > 0);
}

function chip(value, what, live) {
  return fact(whole(value), what, live);
}

function fact(title, what, live) {
  const name = what && ` ${what.replaceAll("_", " ")}`;
  return element("span", { className: live ? "chip live" : "chip" }, element("b", {}, title), name);
}

/** Replace a node's children, unless they are equal, so that a selection survives. */
function refill(node, children) {
  const next = node.cloneNode(false);
  next.append(...children);
  if (!next.isEqualNode(node)) node.replaceChildren(...next.childNodes);
}

/** Polls while the page is visible. */
class Poller {
  constructor(dashboard) {
    this.dashboard = dashboard;
    this.failures = 0;
    this.polledReady = -Infinity;
    document.addEventListener("visibilitychange", () => this.toggle());
    this.toggle();
  }

  toggle() {
    clearTimeout(this.timer);
    this.poll?.abort();
    this.poll = null;
    if (!document.hidden) this.tick();
  }

  async tick() {
    const poll = (this.poll = new AbortController());
    const begun = performance.now();
    try {
      const answer = await call("metrics", { signal: poll.signal });
      const scrape = new Scrape(await answer.text(), performance.now() / 1e3);
      const up = scrape.value("weft_engine_up");
      if (begun / 1e3 - this.polledReady >= SLOW || up !== this.up) {
        [this.polledReady, this.up] = [begun / 1e3, up];
        await this.pollReady(poll.signal);
      }
      this.failures = 0;
      document.body.classList.remove("stale");
      this.dashboard.take(scrape);
    } catch (error) {
      if (poll.signal.aborted) return;
      if (!(error instanceof TypeError || error instanceof ApiError)) throw error;
      this.failures += 1;
      this.polledReady = -Infinity;
      document.body.classList.add("stale");
      show("No connection", "bad");
    }
    if (poll.signal.aborted) return;
    const period = Math.min(PATIENCE, PERIOD * 2 ** this.failures) * 1e3;
    this.timer = setTimeout(() => this.tick(), Math.max(100, period - (performance.now() - begun)));
  }

  async pollReady(signal) {
    try {
      await call("ready", { signal });
      show("Serving", "good");
      await models.load();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      const bad = error.code === "dead" || error.status !== 503;
      show(STATES[error.code] ?? "Not ready", bad ? "bad" : "wait", error.message);
    }
  }
}

const STATES = {
  loading: "Loading",
  draining: "Shutting down",
  dead: "Engine ended",
  model_asleep: "Asleep",
  queue_full: "Queue full",
  queue_tokens_full: "Queue full",
};

function show(label, state, title = "") {
  const status = $("status");
  if (status.textContent !== label) status.textContent = label;
  status.dataset.state = state;
  status.title = title;
}
