// Numbers in words, and new elements. Names of workers and functions are the user's: they become text, never markup.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const three = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

export function count(value) {
  if (value === undefined || value === null) return "";
  for (const [factor, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= factor) return three(value / (unit === "k" ? 1e3 : factor)) + " " + unit;
  }
  if (value >= 10 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value >= 0.01 ? value.toFixed(value < 1 ? 2 : 1) : "<0.01";
}

export function duration(seconds) {
  if (seconds === undefined || seconds === null || seconds === 0) return "–";
  if (seconds < 1e-3) return three(seconds * 1e6) + " µs";
  if (seconds < 1) return three(seconds * 1e3) + " ms";
  if (seconds < 120) return three(seconds) + " s";
  const minutes = Math.floor(seconds / 60);
  if (minutes < 120) return minutes + " min";
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? hours + " h" : Math.floor(hours / 24) + " days";
}

export function size(bytes) {
  if (bytes === undefined || bytes === null) return "";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1000) return (unit === "B" ? Math.round(bytes) : three(bytes)) + " " + unit;
    bytes /= 1024;
  }
  return three(bytes) + " TiB";
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

// Replace the children of `place` only when they would differ: open details and text selections survive.
export function fill(place, key, children) {
  if (place.dataset.key === key) return false;
  place.dataset.key = key;
  place.replaceChildren(...children());
  return true;
}
