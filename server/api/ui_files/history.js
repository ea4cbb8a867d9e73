// Chats and options stored in this browser. They are never sent to the server, and never include the API key.

const MOST_CHATS = 50;
const MOST_IMAGES = 2 ** 21; // stored characters of one chat's images; a browser stores about 5 million

/** Named values per path. If storage is blocked or full, they last as long as the page. */
const kept = {
  prefix: `weft:${location.pathname}:`,
  memory: new Map(),
  get(name) {
    try {
      return JSON.parse(localStorage.getItem(this.prefix + name) ?? "null") ?? this.memory.get(name) ?? null;
    } catch {
      return this.memory.get(name) ?? null;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(this.prefix + name, JSON.stringify(value));
      this.memory.delete(name);
      return true;
    } catch {
      this.memory.set(name, value);
      return false;
    }
  },
  remove(name) {
    this.memory.delete(name);
    try {
      localStorage.removeItem(this.prefix + name);
    } catch {
      // storage is blocked, so there is nothing to remove
    }
  },
  names(start) {
    let stored = [];
    try {
      stored = Object.keys(localStorage).filter((name) => name.startsWith(this.prefix)).map((name) => name.slice(this.prefix.length));
    } catch {
      // storage is blocked: only this page's memory
    }
    return [...new Set([...stored, ...this.memory.keys()])].filter((name) => name.startsWith(start));
  },
};

/** Return turns to store: they have the newest images that fit, and the number of the others. */
function bounded(turns) {
  let left = MOST_IMAGES;
  const fits = (url) => (left -= url.length) >= 0;
  const stored = [...turns].reverse().map((turn) => {
    if (!turn.images) return turn;
    const images = turn.images.filter(fits);
    return { ...turn, images, unstored: (turn.unstored ?? 0) + turn.images.length - images.length };
  });
  return stored.reverse();
}

/** Chats, one value each, so that two tabs do not overwrite each other. */
const chats = {
  /** [{id, title, at, turns}], newest first, without invalid entries. */
  all() {
    const found = kept.names("chat:").map((name) => ({ id: name.slice(5), ...kept.get(name) }));
    return found.filter((chat) => Array.isArray(chat.turns)).sort((a, b) => b.at - a.at);
  },
  get: (id) => chats.all().find((chat) => chat.id === id) ?? null,
  save(id, turns) {
    const title = turns.find((turn) => turn.role === "user")?.content.trim().replace(/\s+/g, " ").slice(0, 80) || "Chat";
    const value = { title, at: Date.now(), turns: bounded(turns) };
    const oldest = () => chats.all().filter((chat) => chat.id !== id).at(-1);
    while (!kept.set(`chat:${id}`, value) && oldest()) kept.remove(`chat:${oldest().id}`); // storage is full
    for (const chat of chats.all().slice(MOST_CHATS)) kept.remove(`chat:${chat.id}`);
  },
  remove: (id) => kept.remove(`chat:${id}`),
  /** The chat that this tab shows, also after a reload. */
  current: {
    get() {
      try {
        return sessionStorage.getItem(`${kept.prefix}current`);
      } catch {
        return null;
      }
    },
    set(id) {
      try {
        sessionStorage.setItem(`${kept.prefix}current`, id);
      } catch {
        // a reload then starts a new chat
      }
    },
  },
};

/** Download a file. */
function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const anchor = element("a", { href: url, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Options that survive a reload: values by field id. */
const OPTIONS = ["mode", "temperature", "limit", "system", "name"];
const options = {
  restore() {
    for (const [id, value] of Object.entries(kept.get("options") ?? {})) {
      const field = OPTIONS.includes(id) && $(id);
      if (!field) continue;
      if (field.tagName !== "SELECT" || [...field.options].some((option) => option.value === value)) field.value = value;
    }
  },
  keep(event) {
    if (OPTIONS.includes(event.target.id)) kept.set("options", { ...kept.get("options"), [event.target.id]: event.target.value });
  },
  has: (id) => Boolean(kept.get("options")?.[id]),
};
