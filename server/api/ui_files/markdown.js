// Renders models' Markdown as DOM nodes; the text is never parsed as HTML.

const LONGEST_SPAN = 2000; // characters between two marks; bounds the time for unclosed marks
const DEEPEST = 6; // maximum nesting of lists and quotes

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}>\s?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:\s+(.*)|\s*)$/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Render a text as nodes. */
function markdown(text) {
  return blocks(text.split("\n"), 0);
}

function blocks(lines, depth) {
  const out = [];
  let paragraph = [];
  const flush = () => {
    const text = paragraph.join("\n").trim();
    if (text) out.push(element("p", {}, ...spans(text)));
    paragraph = [];
  };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    let match;
    if ((match = FENCE.exec(line))) {
      flush();
      const [mark] = match[1];
      const ends = (other) => other.trim().length >= match[1].length && !other.trim().replaceAll(mark, "");
      const end = lines.findIndex((other, j) => j > i && ends(other));
      const last = end < 0 ? lines.length : end; // an unclosed fence is still being written
      out.push(code(lines.slice(i + 1, last).join("\n"), match[2]));
      i = last;
    } else if ((match = HEADING.exec(line))) {
      flush();
      // Answers' headings rank below the page's own.
      out.push(element(`h${Math.min(6, match[1].length + 2)}`, {}, ...spans(match[2])));
    } else if (RULE.test(line)) {
      flush();
      out.push(element("hr"));
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      flush();
      const inside = [];
      for (; i < lines.length && lines[i].trim(); i++) inside.push(lines[i].replace(QUOTE, ""));
      i -= 1;
      out.push(element("blockquote", {}, ...blocks(inside, depth + 1)));
    } else if (ITEM.test(line) && depth < DEEPEST) {
      flush();
      const [node, next] = list(lines, i, depth);
      out.push(node);
      i = next - 1;
    } else if (line.includes("|") && DELIMITERS.test(lines[i + 1] ?? "") && (lines[i + 1] ?? "").includes("-")) {
      flush();
      let end = i + 2;
      while (end < lines.length && lines[end].includes("|")) end += 1;
      out.push(table(lines.slice(i, end)));
      i = end - 1;
    } else if (line.trim()) {
      paragraph.push(line);
    } else {
      flush();
    }
  }
  flush();
  return out;
}

/** Whether a line starts a block other than a paragraph. */
const begins = (line) => [FENCE, HEADING, RULE, QUOTE].some((pattern) => pattern.test(line));

/** Return the list that starts at a line, and the index of the line after it. */
function list(lines, begin, depth) {
  const [, indent, mark] = ITEM.exec(lines[begin]);
  const ordered = /\d/.test(mark);
  const items = [];
  let i = begin;
  for (; i < lines.length; i++) {
    const line = lines[i];
    const match = ITEM.exec(line);
    if (match && match[1].length <= indent.length + 1) {
      if (match[1].length < indent.length || /\d/.test(match[2]) !== ordered) break;
      items.push([match[3] ?? ""]);
    } else if (!line.trim()) {
      const next = lines.slice(i + 1).find((other) => other.trim());
      if (next === undefined || !(ITEM.test(next) || next.startsWith(`${indent}  `))) break;
      items.at(-1).push("");
    } else if (match || line.startsWith(`${indent}  `) || (lines[i - 1].trim() && !begins(line))) {
      items.at(-1).push(line.replace(new RegExp(`^ {0,${indent.length + mark.length + 1}}`), ""));
    } else {
      break;
    }
  }
  const nodes = items.map((item) => {
    const inside = blocks(item, depth + 1);
    // A single line needs no paragraph.
    if (inside[0]?.tagName === "P") inside.splice(0, 1, ...inside[0].childNodes);
    return element("li", {}, ...inside);
  });
  const node = element(ordered ? "ol" : "ul", {}, ...nodes);
  if (ordered && parseInt(mark) !== 1) node.start = parseInt(mark);
  return [node, i];
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, tag) => element("tr", {}, ...cells(line).map((cell) => element(tag, {}, ...spans(cell))));
  const body = lines.slice(2).map((line) => row(line, "td"));
  const node = element("table", {}, element("thead", {}, row(lines[0], "th")), element("tbody", {}, ...body));
  return element("div", { className: "wide-table", tabIndex: 0, role: "region", "aria-label": "Table" }, node);
}

function code(text, language) {
  const button = element("button", { type: "button", className: "quiet copy", "aria-label": "Copy the code" }, "Copy");
  const body = element("code", {}, text);
  return element(
    "div",
    { className: "code" },
    element("div", { className: "code-bar" }, element("span", {}, language), button),
    element("pre", { tabIndex: 0 }, body),
  );
}

const SPAN = new RegExp(
  [
    /\\([\\`*_{}[\]()#+.!|~>-])/.source, // 1 an escaped mark
    /(`+)(?!`)([\s\S]{0,SIZE}?[^`])\2(?!`)/.source, // 2, 3 code
    /\*\*(?=\S)([\s\S]{0,SIZE}?\S)\*\*/.source, // 4 strong
    /(?<!\w)__(?=\S)([\s\S]{0,SIZE}?\S)__(?!\w)/.source, // 5 strong
    /\*(?=[^\s*])([\s\S]{0,SIZE}?[^\s*])\*(?!\*)/.source, // 6 emphasis
    /(?<!\w)_(?=[^\s_])([\s\S]{0,SIZE}?[^\s_])_(?!\w)/.source, // 7 emphasis
    /~~(?=\S)([\s\S]{0,SIZE}?\S)~~/.source, // 8 struck
    /\[([^\[\]]{1,SIZE})\]\(\s*<?([^\s()<>]{1,SIZE}(?:\([^\s()]*\)[^\s()<>]*)?)>?(?:\s+"[^"]*")?\s*\)/.source, // 9, 10 link
    /\b(https?:\/\/[^\s<>"'`]{1,SIZE})/.source, // 11 an address
  ].join("|").replaceAll("SIZE", String(LONGEST_SPAN)),
  "g",
);

/** Render a line or a paragraph. */
function spans(text, depth = 0) {
  const out = [];
  let end = 0;
  for (const match of text.matchAll(SPAN)) {
    const [whole, escaped, , inline, strong, strong2, em, em2, struck, label, target, address] = match;
    let node;
    if (depth > DEEPEST) break;
    const inside = (content) => spans(content, depth + 1);
    if (escaped) node = escaped;
    else if (inline) node = element("code", {}, inline.trim() || inline);
    else if (strong ?? strong2) node = element("strong", {}, ...inside(strong ?? strong2));
    else if (em ?? em2) node = element("em", {}, ...inside(em ?? em2));
    else if (struck) node = element("del", {}, ...inside(struck));
    else if (target) node = link(target, inside(label)) ?? whole;
    else if (address) {
      const [, bare, rest] = /^(.*?)([.,;:!?)\]]*)$/s.exec(address);
      out.push(text.slice(end, match.index), link(bare, [bare]) ?? bare, rest);
      end = match.index + whole.length;
      continue;
    }
    out.push(text.slice(end, match.index), node);
    end = match.index + whole.length;
  }
  out.push(text.slice(end));
  return out.filter((part) => part !== "");
}

/** A link to a web or mail address; `null` for any other scheme. */
function link(target, inside) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return null; // relative paths are not links: this server has no such pages
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...inside);
}

/** Show these nodes, and keep equal leading nodes in place, so that a selection survives. */
function settle(place, nodes) {
  const there = [...place.childNodes];
  let same = 0;
  while (same < there.length && same < nodes.length && there[same].isEqualNode(nodes[same])) same += 1;
  for (const node of there.slice(same)) node.remove();
  place.append(...nodes.slice(same));
}

/** Handle all copy buttons, including later ones. */
document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("button.copy");
  if (!button) return;
  const body = button.closest(".code").querySelector("code");
  try {
    await navigator.clipboard.writeText(body.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(body); // without TLS there is no clipboard API
    button.textContent = "Press Ctrl+C";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
});
