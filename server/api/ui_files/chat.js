// The chat: streams answers, can be stopped, and shows errors.

const HIGHEST = 160; // maximum height of the message box, in pixels
const USUAL_LIMIT = 512; // default token limit of an answer; at most half the context

/** The served models, once loaded. */
const models = {
  context: null,
  names: [],
  barred: false, // waiting for a new key; requests would fail until then
  async load() {
    if (this.names.length || this.barred) return;
    try {
      const { data } = await (await call("v1/models")).json();
      this.names = data.map((model) => model.id);
      images.models = new Set(data.filter((model) => model.input_modalities?.includes("image")).map((model) => model.id));
      this.context = Math.min(...data.map((model) => model.max_model_len ?? Infinity)); // null for models that were never awake
      $("name").replaceChildren(...this.names.map((name) => element("option", {}, name)));
      $("limit").value = Math.min(USUAL_LIMIT, Math.floor(this.context / 2));
      options.restore();
      images.offer();
      $("models").hidden = this.names.length < 2;
      $("forget").hidden = !key.get();
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
    $("key-note").textContent = "The server rejected this key. Try another one.";
    $("key-note").classList.add("error");
  }
  models.names = [];
  models.barred = true;
  $("forget").hidden = true;
  $("key-form").hidden = false;
}

class Chat {
  turns = []; // [{role, content, images, unstored, note, plain}] of answered turns
  running = null;
  id = null; // storage id

  constructor() {
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      images.ready.then(() => this.send($("question").value));
    });
    images.start();
    // The browser's own message needs a visible field, so it does not appear while the options are closed.
    $("ask").addEventListener("invalid", (event) => this.refuse(event), true);
    $("ask").addEventListener("change", (event) => options.keep(event));
    $("ask").addEventListener("input", () => ($("invalid").textContent = ""));
    options.restore();
    $("question").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      $("ask").requestSubmit();
    });
    $("question").addEventListener("input", fit);
    $("stop").addEventListener("click", () => this.running?.abort());
    $("chat").addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      if ($("history").hidden) return this.running?.abort();
      this.list(false);
      $("chats").focus();
    });
    $("chats").addEventListener("click", () => this.list($("history").hidden));
    $("export").addEventListener("click", () => this.export());
    $("delete-all").addEventListener("click", () => {
      if (!confirm("Delete all chats stored in this browser?")) return;
      for (const { id } of chats.all()) chats.remove(id);
      this.clear();
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
      $("key-note").textContent = "The key was deleted.";
      $("key-note").classList.remove("error");
      askForKey();
      $("key").focus();
    });
  }

  clear() {
    this.open({ id: null, turns: [] });
    $("question").focus();
  }

  /** Show a chat. */
  open({ id, turns }) {
    this.running?.abort();
    this.running = null;
    this.busy(false);
    this.list(false);
    this.id = id;
    images.set([]);
    chats.current.set(id ?? "");
    this.turns = turns;
    $("log").replaceChildren($("starters"));
    $("starters").hidden = turns.length > 0;
    for (const turn of turns) {
      const node = this.post(turn.role, turn.content, turn.plain, turn);
      node.lastChild.textContent = turn.note ?? "";
      node.classList.remove("waiting");
      node.removeAttribute("aria-busy");
    }
    this.offer();
  }

  /** Enable the buttons that apply. */
  offer() {
    const any = this.turns.length > 0 || $("log").childElementCount > 1;
    for (const id of ["clear", "export"]) $(id).disabled = !any;
    $("chats").disabled = !chats.all().length;
  }

  /** Store these turns. */
  keep(...turns) {
    this.turns.push(...turns);
    this.id ??= `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
    chats.current.set(this.id);
    chats.save(this.id, this.turns);
    this.offer();
  }

  /** Show or hide the list of chats. */
  list(shown) {
    const all = chats.all();
    shown &&= all.length > 0;
    $("history").hidden = !shown;
    $("chats").setAttribute("aria-expanded", String(shown));
    $("chats").disabled = !all.length;
    if (!shown) return;
    const rows = all.map((chat) => {
      const title = element("button", { type: "button", className: "title" }, chat.title);
      if (chat.id === this.id) title.setAttribute("aria-current", "true");
      title.addEventListener("click", () => {
        this.open(chat);
        $("question").focus();
      });
      const remove = element("button", { type: "button", className: "quiet", "aria-label": `Delete: ${chat.title}` }, "×");
      remove.addEventListener("click", () => {
        chats.remove(chat.id);
        if (chat.id === this.id) this.open({ id: null, turns: [] });
        this.list(true);
        ($("history").hidden ? $("question") : $("history").querySelector("button")).focus();
      });
      const when = new Date(chat.at);
      const short = when.toDateString() === new Date().toDateString() ? when.toLocaleTimeString([], { timeStyle: "short" }) : when.toLocaleDateString();
      const at = element("time", { dateTime: when.toISOString(), title: when.toLocaleString() }, short);
      return element("li", {}, title, at, remove);
    });
    $("history").querySelector("ul").replaceChildren(...rows);
  }

  export() {
    const messages = this.turns.map(message);
    const text = JSON.stringify({ model: $("name").value, messages }, null, 2);
    download(`chat-${new Date().toISOString().slice(0, 19).replaceAll(":", "")}.json`, `${text}\n`, "application/json");
  }

  /** Report an invalid field and open the options that hide it. */
  refuse(event) {
    event.preventDefault();
    const field = event.target;
    $("ask").querySelector("details").open = true;
    const name = field.closest("label")?.firstChild.textContent.trim() ?? field.id;
    $("invalid").textContent ||= `${name}: ${field.validationMessage}`;
    if (document.activeElement?.matches("#ask details :invalid") !== true) field.focus();
    $("invalid").scrollIntoView({ block: "nearest" });
  }

  async send(question) {
    if (this.running || !(question.trim() || images.urls.length)) return;
    if (images.urls.length && images.refusal()) return ($("invalid").textContent = images.refusal());
    const running = (this.running = new AbortController());
    this.busy(true);
    this.list(false);
    $("invalid").textContent = "";
    const plain = $("mode").value === "completion";
    const turn = { role: "user", content: question };
    if (images.urls.length) turn.images = images.take();
    const posted = this.post("user", question, true, turn);
    const answer = this.post("assistant", "");
    const words = new Words(answer.firstChild, plain);
    const whole = (...notes) => {
      words.show();
      answer.lastChild.textContent = [meter.text(), ...notes].filter(Boolean).join(" · ");
      return [turn, { role: "assistant", content: words.text, note: answer.lastChild.textContent, plain }];
    };
    $("question").value = "";
    fit();
    const meter = new Meter();
    try {
      const { path, body } = this.request(turn);
      for await (const event of events(await call(path, { body, signal: running.signal }))) {
        const choice = event.choices[0];
        const piece = choice?.delta?.content ?? choice?.text ?? "";
        meter.count(event, piece);
        if (this.running !== running) return; // the page shows another chat
        if (piece) {
          words.add(piece);
          answer.classList.remove("waiting");
        }
        answer.lastChild.textContent = meter.text();
        follow();
      }
      this.keep(...whole());
    } catch (error) {
      if (this.running !== running) return;
      if (running.signal.aborted) {
        const turns = whole("stopped");
        if (words.text) this.keep(...turns);
      } else {
        whole("aborted");
        this.fail(error, answer, posted);
        if (!$("question").value) $("question").value = question;
        if (!images.urls.length) images.set(turn.images ?? []);
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

  /** Return the path and body that send a turn. */
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
    return { path: "v1/chat/completions", body: { ...body, messages: [...system, ...[...this.turns, turn].map(message)] } };
  }

  post(role, content, plain = role === "user", turn = {}) {
    const node = element(
      "article",
      { className: `message ${role}`, "aria-label": role === "user" ? "You" : "The model" },
      element("div", { className: plain ? "text plain" : "text" }, ...(plain ? [content] : markdown(content))),
      ...shown(turn),
      element("p", { className: "note", title: "Measured in this page, including the network round trip" }),
    );
    if (role === "assistant") {
      node.classList.add("waiting");
      node.setAttribute("aria-busy", "true"); // screen readers wait for the complete answer
    }
    $("starters").hidden = true;
    $("clear").disabled = false;
    $("log").append(node);
    $("log").scrollTop = $("log").scrollHeight;
    return node;
  }

  /** Show an error; it replaces an empty answer. */
  fail(error, after, posted) {
    if (error.status === 401) askForKey();
    const again = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    const what = error instanceof TypeError ? "The server cannot be reached." : error.message;
    const node = element("p", { className: "error", role: "alert" }, what + again);
    if (after && !after.firstChild.textContent) {
      after.replaceWith(node);
      posted?.classList.add("unanswered");
    } else {
      $("log").append(node);
    }
    node.scrollIntoView({ block: "nearest" });
  }

  busy(on) {
    const left = on ? $("send") : $("stop");
    const focused = document.activeElement === left;
    $("send").hidden = on;
    $("stop").hidden = !on;
    if (focused) (on ? $("stop") : $("question")).focus(); // otherwise hiding the button drops the focus
  }
}

/** The text of an answer, rendered at most once per frame. */
class Words {
  text = "";
  scheduled = false;

  constructor(place, plain) {
    this.place = place;
    this.plain = plain;
    place.classList.toggle("plain", plain);
  }

  add(piece) {
    this.text += piece;
    if (this.scheduled) return;
    this.scheduled = true;
    const soon = this.text.length > 20000 ? (work) => setTimeout(work, 300) : requestAnimationFrame;
    // A hidden page has no frames, but screen readers still need the text.
    if (document.hidden) setTimeout(() => this.show(), 300);
    else soon(() => this.show());
  }

  show() {
    this.scheduled = false;
    settle(this.place, this.plain ? [document.createTextNode(this.text)] : markdown(this.text));
    follow();
  }
}

/** Times and counts of a stream, measured in the page. */
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
      this.reason === "length" && "stopped at the token limit",
    ];
    return parts.filter(Boolean).join(" · ");
  }
}

/** Keep the end of the conversation in view, unless the user has scrolled up. */
function follow() {
  const log = $("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
}

/** Fit the box's height to its content. */
function fit() {
  const box = $("question");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, HIGHEST)}px`;
  box.style.overflowY = box.scrollHeight + 2 > HIGHEST ? "auto" : "hidden";
}

const chat = new Chat();
chat.open(chats.get(chats.current.get()) ?? { id: null, turns: [] });
new Poller(new Dashboard());
