// Calls to the daemon, with the API key if set. Paths are relative, so a proxy can serve the page under a prefix.

const KEY = "weft-api-key";

const key = {
  /** The key lasts as long as the tab, or as long as the page if storage is blocked. */
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

/** An error answer in OpenAI's format. */
class ApiError extends Error {
  constructor(status, error, retryAfter) {
    super(error?.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
    this.retryAfter = retryAfter;
  }
}

/** Throws `ApiError` for an error status, and `TypeError` if there is no answer. */
async function call(path, { body, signal } = {}) {
  const headers = {};
  // Headers hold bytes, but a key can contain any character; the server decodes UTF-8.
  if (key.get()) headers.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key.get()))}`;
  if (body) headers["Content-Type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal, cache: "no-store", credentials: "same-origin" };
  const answer = await fetch(path, { ...options, body: body && JSON.stringify(body) });
  if (answer.ok) return answer;
  const error = (await answer.json().catch(() => null))?.error;
  throw new ApiError(answer.status, error, Number(answer.headers.get("Retry-After")) || null);
}

/** The objects of an event stream. Throws if it ends without `[DONE]`. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The connection was lost before the answer was complete.");
    });
    if (done) throw new Error("The connection closed before the answer was complete.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // a keep-alive comment, or the end of an event
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(null, event.error, null);
      yield event;
    }
  }
}
