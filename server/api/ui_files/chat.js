// A box to try the model: a conversation that streams, can be stopped, and shows what went wrong.

const HIGHEST = 160; // pixels that the box for a message grows to
const USUAL_LIMIT = 512; // tokens of an answer, or half the context

/** The models served, once the server told. */
const models = {
  context: null,
  names: [],
  barred: false, // a key is being asked for: without another one the answer would be the same
  async load() {
    if (this.names.length || this.barred) return;
    try {
      const { data } = await (await call("v1/models")).json();
      this.names = data.map((model) => model.id);
      this.context = data[0].max_model_len;
      $("limit").value = Math.min(USUAL_LIMIT, Math.floor(this.context / 2));
      $("name").replaceChildren(...this.names.map((name) => element("option", {}, name)));
      $("models").hidden = this.names.length < 2;
      $("forget").hidden = !key.get();
      $("docs").hidden = Boolean(key.get()); // a link cannot present the key
      $("key-form").hidden = true;
    } catch (error) {
      if (error.status !== 401) throw error;
      askForKey();
    }
  },
};

function askForKey() {
  if (key.get()) {
    key.set("");
    $("key-note").textContent = "That key was refused. Try another one.";
    $("key-note").classList.add("error");
  }
  models.names = [];
  models.barred = true;
  $("forget").hidden = $("docs").hidden = true;
  $("key-form").hidden = false;
}

class Chat {
  turns = []; // [{role, content}] of what was answered
  running = null;

  constructor() {
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send($("question").value);
    });
    $("question").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      $("ask").requestSubmit();
    });
    $("question").addEventListener("input", fit);
    $("stop").addEventListener("click", () => this.running?.abort());
    $("chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.running?.abort();
    });
    for (const starter of document.querySelectorAll(".starter")) {
      starter.addEventListener("click", () => this.send(starter.textContent));
    }
    $("clear").addEventListener("click", () => this.clear());
    $("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      key.set($("key").value.trim());
      $("key").value = "";
      models.barred = false;
      models.load().then(
        () => !$("forget").hidden && $("question").focus(),
        (error) => this.fail(error),
      );
    });
    $("forget").addEventListener("click", () => {
      key.set("");
      $("key-note").textContent = "The key is forgotten.";
      $("key-note").classList.remove("error");
      askForKey();
      $("key").focus();
    });
  }

  clear() {
    this.running?.abort();
    this.turns = [];
    $("log").replaceChildren($("starters"));
    $("starters").hidden = false;
    $("clear").hidden = true;
    $("question").focus();
  }

  async send(question) {
    if (this.running || !question.trim()) return;
    const running = (this.running = new AbortController());
    this.busy(true);
    this.post("user", question);
    const answer = this.post("assistant", "");
    const words = answer.firstChild.appendChild(document.createTextNode(""));
    const turn = { role: "user", content: question };
    $("question").value = "";
    fit();
    const meter = new Meter();
    try {
      const { path, body } = this.request(turn);
      for await (const event of events(await call(path, { body, signal: running.signal }))) {
        const choice = event.choices[0];
        const piece = choice?.delta?.content ?? choice?.text ?? "";
        meter.count(event, piece);
        if (piece) {
          words.appendData(piece);
          answer.classList.remove("waiting");
        }
        answer.lastChild.textContent = meter.text();
        follow();
      }
      this.turns.push(turn, { role: "assistant", content: words.data });
    } catch (error) {
      if (running.signal.aborted) {
        answer.lastChild.textContent = [meter.text(), "stopped"].filter(Boolean).join(" · ");
        if (words.data) this.turns.push(turn, { role: "assistant", content: words.data });
      } else {
        this.fail(error, answer);
        if (!$("question").value) $("question").value = question;
        fit();
      }
    }
    answer.classList.remove("waiting");
    answer.removeAttribute("aria-busy");
    if (this.running === running) {
      this.running = null;
      this.busy(false);
    }
    follow();
  }

  /** Where to send a turn, and as what. */
  request(turn) {
    const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
    const body = {
      model: $("name").value || undefined,
      max_tokens: number("limit"),
      temperature: number("temperature"),
      stream: true,
      stream_options: { include_usage: true },
    };
    if ($("mode").value === "completion") return { path: "v1/completions", body: { ...body, prompt: turn.content } };
    const system = $("system").value ? [{ role: "system", content: $("system").value }] : [];
    return { path: "v1/chat/completions", body: { ...body, messages: [...system, ...this.turns, turn] } };
  }

  post(role, content) {
    const node = element(
      "article",
      { className: `message ${role}`, "aria-label": role === "user" ? "You" : "The model" },
      element("p", { className: "text" }, content),
      element("p", { className: "note" }),
    );
    if (role === "assistant") {
      node.classList.add("waiting");
      node.setAttribute("aria-busy", "true"); // read out once it is whole
    }
    $("starters").hidden = true;
    $("clear").hidden = false;
    $("log").append(node);
    $("log").scrollTop = $("log").scrollHeight;
    return node;
  }

  fail(error, after) {
    if (error.status === 401) askForKey();
    const again = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    const what = error instanceof TypeError ? "The server cannot be reached." : error.message;
    const node = element("p", { className: "error", role: "alert" }, what + again);
    if (after && !after.firstChild.textContent) after.replaceWith(node);
    else $("log").append(node);
    follow();
  }

  busy(on) {
    const left = on ? $("send") : $("stop");
    const focused = document.activeElement === left;
    $("send").hidden = on;
    $("stop").hidden = !on;
    if (focused) (on ? $("stop") : $("question")).focus(); // hidden with the focus, it would lose the keyboard's place
  }
}

/** What a stream looked like from here. */
class Meter {
  begun = performance.now();
  first = null;
  last = null;
  pieces = 0;
  reason = null;

  count(event, piece) {
    if (piece) {
      this.last = performance.now();
      this.first ??= this.last;
      this.pieces += 1;
    }
    this.tokens = event.usage?.completion_tokens ?? this.tokens;
    this.cached = event.usage?.prompt_tokens_details?.cached_tokens ?? this.cached;
    this.reason = event.choices[0]?.finish_reason ?? this.reason;
  }

  text() {
    if (this.first === null) return "";
    const tokens = this.tokens ?? this.pieces;
    const speed = tokens > 1 && this.last > this.first ? ((tokens - 1) / (this.last - this.first)) * 1e3 : null;
    const parts = [
      `first token after ${text(seconds((this.first - this.begun) / 1e3))}`,
      `${tokens} ${tokens === 1 ? "token" : "tokens"}`,
      speed && text(per("tok/s")(speed)),
      this.cached && `${this.cached} cached`,
      this.reason === "length" && "cut at the limit",
    ];
    return parts.filter(Boolean).join(" · ");
  }
}

/** Keep the end of the conversation in view, unless the reader has scrolled away from it. */
function follow() {
  const log = $("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
}

/** Make the box as high as what is in it. */
function fit() {
  const box = $("question");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, HIGHEST)}px`;
  box.style.overflowY = box.scrollHeight + 2 > HIGHEST ? "auto" : "hidden";
}

new Chat();
new Clock(new Board());
