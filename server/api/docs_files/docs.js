// "Try it": sends a form to its endpoint with this tab's API key and shows the answer as it streams.

const MOST_SHOWN = 200000; // maximum characters shown of an answer

const keyField = document.getElementById("key");
keyField.value = key.get();
keyField.addEventListener("change", () => {
  key.set(keyField.value.trim());
  fillModels();
});
document.getElementById("key-form").addEventListener("submit", (event) => event.preventDefault());

/** Insert the served model's name into the examples. */
async function fillModels() {
  let name;
  try {
    name = (await (await call("v1/models")).json()).data[0].id;
  } catch {
    return; // no key yet, or no server: the examples keep MODEL
  }
  for (const field of document.querySelectorAll("form.try :is(textarea, input)")) {
    field.value = field.value.replace("MODEL", name);
  }
}
fillModels();

for (const form of document.querySelectorAll("form.try")) {
  const part = (name) => form.querySelector(`.${name}`);
  let running = null;

  const address = () => {
    let path = form.dataset.path.slice(1);
    for (const field of form.querySelectorAll("input[data-name]")) {
      path = path.replace(`{${field.dataset.name}}`, encodeURIComponent(field.value).replaceAll("%2F", "/"));
    }
    return path;
  };

  /** The body; `undefined` if there is none; `null`, after an error message, if it is not JSON. */
  const body = () => {
    if (!part("body")) return undefined;
    try {
      return JSON.stringify(JSON.parse(part("body").value));
    } catch (error) {
      showStatus(`The body is not valid JSON: ${error.message}`, "", true);
      part("body").focus();
      return null;
    }
  };

  const showStatus = (status, text, bad = false) => {
    part("status").textContent = status;
    part("status").classList.toggle("error", bad);
    part("answer").textContent = text;
    part("answer").hidden = !text;
  };

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const content = body();
    if (running || content === null) return;
    running = new AbortController();
    part("stop").hidden = false;
    part("send").disabled = true;
    showStatus("Waiting …", "");
    const begun = performance.now();
    const took = () => `${Math.round(performance.now() - begun)} ms`;
    try {
      const headers = {};
      if (key.get()) headers.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key.get()))}`;
      if (content !== undefined) headers["Content-Type"] = "application/json";
      const options = { method: form.dataset.method, headers, body: content, cache: "no-store", signal: running.signal };
      const answer = await fetch(address(), options);
      const kind = (answer.headers.get("Content-Type") ?? "").split(";")[0];
      const status = () => `${answer.status} ${answer.statusText} · ${kind || "no body"} · ${took()}`;
      const reader = answer.body?.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = (await reader?.read()) ?? { done: true };
        if (done) break;
        text += value;
        if (kind === "text/event-stream") showStatus(status(), text.slice(0, MOST_SHOWN), !answer.ok);
      }
      if (kind === "application/json") {
        try {
          text = JSON.stringify(JSON.parse(text), null, 2);
        } catch {
          // not JSON: shown unchanged
        }
      }
      const cut = text.length > MOST_SHOWN ? `\n… and ${text.length - MOST_SHOWN} more characters` : "";
      showStatus(status(), text.slice(0, MOST_SHOWN) + cut, !answer.ok);
      if (answer.status === 401) keyField.focus();
    } catch (error) {
      const shown = part("answer").textContent;
      if (running.signal.aborted) showStatus(`Stopped after ${took()}`, shown);
      else showStatus(shown ? "The connection was lost before the answer was complete." : "The server cannot be reached.", shown, true);
    }
    running = null;
    part("stop").hidden = true;
    part("send").disabled = false;
  });

  part("stop").addEventListener("click", () => running?.abort());
  part("curl").addEventListener("click", () => {
    const content = body();
    if (content === null) return;
    const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
    const words = ["curl", quoted(new URL(address(), location.href).href)];
    if (key.get()) words.push('-H "Authorization: Bearer $WEFT_API_KEY"');
    if (content !== undefined) words.push("-H 'Content-Type: application/json'", "-d", quoted(content));
    else if (form.dataset.method !== "GET") words.push("-X", form.dataset.method);
    showStatus("Shell command:", words.join(" "));
  });
}
