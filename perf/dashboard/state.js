// What is shown: the filters and the open case, kept in the page's address so that a link shows the same.
const DATA = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("filters");
const FILTERS = ["q", "gpu", "dtypes", "pages", "heads", "lengths", "bar"];

function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  const state = Object.fromEntries(FILTERS.map((name) => [name, given.get(name) ?? ""]));
  if (!(state.gpu in DATA)) state.gpu = Object.keys(DATA)[0];
  state.unpeered = given.get("unpeered") === "1";
  state.case = given.get("case") ?? "";
  return state;
}

function stateOfForm() {
  const state = Object.fromEntries(FILTERS.map((name) => [name, form.elements[name].value]));
  const boxes = document.querySelectorAll("input[name=unpeered]");
  state.unpeered = [...boxes].some((box) => box.checked);
  state.case = readState().case;
  return state;
}

function hashOf(state) {
  const given = new URLSearchParams();
  for (const name of FILTERS) {
    if (state[name] && !(name === "gpu" && state.gpu === Object.keys(DATA)[0])) given.set(name, state[name]);
  }
  if (state.unpeered) given.set("unpeered", "1");
  if (state.case) given.set("case", state.case);
  return "#" + given;
}

// Opening a case is a step that "back" undoes; a filter is not.
function go(state, step) {
  history[step ? "pushState" : "replaceState"](null, "", hashOf(state));
  show();
}

function matches(item, state) {
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  const text = [item.name, item.heads, item.rows, item.options, item.dtypes, item.pages].join(" ").toLowerCase();
  const bar = item.bar && item.bar_met !== null ? (item.bar_met ? "met" : "missed") : "none";
  return (
    words.every((word) => text.includes(word)) &&
    ["dtypes", "pages", "heads"].every((name) => !state[name] || state[name] === item[name]) &&
    (!state.lengths || (state.lengths === "ragged") === item.ragged) &&
    (!state.bar || state.bar === bar)
  );
}

function visibleCases(state) {
  return new Set(Object.values(DATA[state.gpu].cases).filter((item) => matches(item, state)).map((item) => item.name));
}
