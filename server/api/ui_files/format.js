// Format figures for display: each function returns [number, unit].

const NONE = ["–", ""];

function digits(value) {
  return value.toFixed(value >= 99.5 || Number.isInteger(value) ? 0 : value >= 9.95 ? 1 : 2);
}

function scaled(value, steps) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const [size, unit] = steps.find(([size]) => value >= size * 0.9995) ?? steps.at(-1);
  return [digits(value / size), unit];
}

const THOUSANDS = [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];

function count(value) {
  const [number, unit] = scaled(value, THOUSANDS);
  return [number + unit, ""];
}

const per = (unit) => (value) => [count(value)[0], unit];
const seconds = (value) => (value === 0 ? ["0", "ms"] : scaled(value, SECONDS));
const bytes = (value) => scaled(value, BYTES);

function percent(value) {
  return value === null || value === undefined ? NONE : [digits(value * 100), "%"];
}

/** A whole number with thousands separators. */
const whole = (value) => Math.round(value).toLocaleString("en");
const text = ([number, unit]) => (unit ? `${number} ${unit}` : number);
/** Like `text`, without trailing zeros. */
const neat = (figure) => text(figure).replace(/(\.\d*?)0+(?=\D*$)/, "$1").replace(/\.(?=\D*$)/, "");
