// A tile: title, current figure, and up to two minutes of lines. All charts share one time cursor.

const SHORTEST = 30; // seconds shown at first
const LONGEST = 120; // seconds shown at most
const GAP = 4; // a gap in seconds that breaks the line
const SVG = "http://www.w3.org/2000/svg";

/** Create an element with properties, attributes (names with a dash) and children. */
function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Round up to 1, 1.5, 2, 3, 5 or 8 times a power of ten. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 8, 10].find((step) => step * power >= value * 0.9999) * power;
}

class Chart {
  static WIDTH = 240;
  static HEIGHT = 64;

  /**
   * title: the tile's title. format: formats its figures. note: the title's tooltip. top: a fixed top of the scale.
   * lines: [{name, value}], where `value` maps {now, short, long} to a number, `null` or `undefined`.
   */
  constructor({ title, format, lines, top, note }) {
    this.format = format;
    this.top = top;
    this.lines = lines.map(({ name, value }, i) => ({
      name,
      value,
      points: [],
      known: false,
      area: svg("path", { class: `area series${i}` }),
      stroke: svg("path", { class: `line series${i}` }),
      figure: element("span", { className: "figure" }),
      unit: element("span", { className: "unit" }),
    }));
    this.rule = svg("line", { class: "cursor", y1: 0, y2: Chart.HEIGHT });
    this.picture = svg(
      "svg",
      { viewBox: `0 0 ${Chart.WIDTH} ${Chart.HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      ...this.lines.map((line) => line.area),
      ...this.lines.map((line) => line.stroke).reverse(),
      this.rule,
    );
    this.scale = element("span", { className: "scale", "aria-hidden": "true" });
    this.title = title;
    this.legend = this.lines.map((line, i) =>
      element(
        "span",
        { className: `value series${i}` },
        ...(this.lines.length > 1 || i ? [element("span", { className: "name" }, line.name)] : []),
        line.figure,
        line.unit,
      ),
    );
    this.node = element(
      "article",
      { className: "tile", hidden: true },
      element("h3", { title: note ?? "" }, title),
      element("p", { className: "values" }, ...this.legend),
      element("div", { className: "plot" }, this.picture, this.scale),
    );
    this.picture.addEventListener("pointermove", (event) => {
      const box = this.picture.getBoundingClientRect();
      Chart.point(Math.round(Chart.span * (1 - (event.clientX - box.left) / box.width)));
    });
    this.picture.addEventListener("pointerleave", () => Chart.point(null));
  }

  static span = SHORTEST;
  static age = null; // the cursor's position, in seconds before now
  static point = () => {};

  add(time, sample) {
    for (const line of this.lines) {
      const value = line.value(sample);
      line.known = value !== undefined;
      line.points.push({ time, value: value ?? null });
      while (line.points[0].time < time - LONGEST - GAP) line.points.shift();
    }
    this.node.hidden = !this.lines.some((line) => line.known);
  }

  draw(now) {
    if (this.node.hidden) return;
    const values = this.lines.flatMap((line) => line.points.map((point) => point.value ?? 0));
    const top = this.top ?? ceiling(Math.max(...values));
    const age = Chart.age;
    this.scale.textContent = neat(this.format(top));
    this.rule.classList.toggle("on", age !== null);
    const x = (time) => Chart.WIDTH * (1 - (now - time) / Chart.span);
    if (age !== null) {
      this.rule.setAttribute("x1", x(now - age));
      this.rule.setAttribute("x2", x(now - age));
    }
    for (const [i, line] of this.lines.entries()) {
      this.legend[i].hidden = !line.known;
      const [number, unit] = this.format(age === null ? line.points.at(-1)?.value : at(line.points, now - age));
      line.figure.textContent = number;
      line.unit.textContent = unit;
      this.paint(line, x, top);
    }
    const known = this.lines.filter((line) => line.known);
    const said = known.map((line) => `${line.name} ${line.figure.textContent} ${line.unit.textContent}`);
    this.picture.setAttribute("aria-label", `${this.title}: ${said.join(", ")}`);
  }

  paint(line, x, top) {
    const y = (value) => (Chart.HEIGHT - 1.5) * (1 - Math.min(1, value / top)) + 0.75;
    let [stroke, area, begin, last] = ["", "", null, null];
    const close = () => {
      if (begin !== null) area += `L${x(last).toFixed(1)} ${Chart.HEIGHT}L${x(begin).toFixed(1)} ${Chart.HEIGHT}Z`;
      begin = null;
    };
    for (const { time, value } of line.points) {
      if (value === null || (last !== null && time - last > GAP)) close();
      if (value === null) continue;
      const step = `${begin === null ? "M" : "L"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
      stroke += step;
      area += step;
      begin ??= time;
      last = time;
    }
    close();
    line.stroke.setAttribute("d", stroke);
    line.area.setAttribute("d", area);
  }
}

/** The value of the nearest point, or `null` if none is near. */
function at(points, time) {
  let best = null;
  for (const point of points) {
    if (best === null || Math.abs(point.time - time) < Math.abs(best.time - time)) best = point;
  }
  return best !== null && Math.abs(best.time - time) <= GAP ? best.value : null;
}
