// Calls of the daemon, with the key if there is one. Addresses are relative, so that a proxy may serve below a path.

const KEY = "weft-api-key";

const key = {
  /** The key lives as long as the tab; where storage is barred, as long as the page. */
  get: () => {
    try {
      return sessionStorage.getItem(KEY) ?? "";
    } catch {
      return key.memory ?? "";
    }
  },
  set: (value) => {
    try {
      if (value) sessionStorage.setItem(KEY, value);
      else sessionStorage.removeItem(KEY);
    } catch {
      key.memory = value;
    }
  },
};

/** An answer that is an error, in OpenAI's form. */
class ApiError extends Error {
  constructor(status, error, retryAfter) {
    super(error?.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
    this.retryAfter = retryAfter;
  }
}

/** Throws `ApiError` for a status that is none of success, and `TypeError` when there is no answer. */
async function call(path, { body, signal } = {}) {
  const headers = {};
  // A key may have any character, a header only bytes: what the server reads are those of UTF-8.
  if (key.get()) headers.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key.get()))}`;
  if (body) headers["Content-Type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal, cache: "no-store", credentials: "same-origin" };
  const answer = await fetch(path, { ...options, body: body && JSON.stringify(body) });
  if (answer.ok) return answer;
  const error = (await answer.json().catch(() => null))?.error;
  throw new ApiError(answer.status, error, Number(answer.headers.get("Retry-After")) || null);
}

/** The objects of an event stream. Throws when it ends without its `[DONE]`. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The connection broke before the answer ended.");
    });
    if (done) throw new Error("The connection ended before the answer did.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // a comment that keeps the connection awake, or the end of an event
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(null, event.error, null);
      yield event;
    }
  }
}
