// Wiring: the address says what is shown; the form and the buttons change the address.
function show() {
  const state = readState();
  for (const name of FILTERS) form.elements[name].value = state[name];
  for (const box of document.querySelectorAll("input[name=unpeered]")) box.checked = state.unpeered;
  const visible = visibleCases(state);
  filterTables(state, visible);
  drawOverview(state, visible);
  showCase(state);
}

form.addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("input", (event) => {
  if (event.target.form !== form) return;
  if (event.target.name === "unpeered") {
    for (const box of document.querySelectorAll("input[name=unpeered]")) box.checked = event.target.checked;
  }
  go(stateOfForm(), false);
});
form.addEventListener("reset", (event) => {
  event.preventDefault();
  go({ gpu: readState().gpu, case: "" }, false);
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-open]");
  if (!button) return;
  opener = button;
  go({ ...readState(), case: button.dataset.open }, true);
});
addEventListener("popstate", show);
addEventListener("hashchange", show);
addEventListener("resize", () => charts.forEach((chart) => chart.resize()));

const wanted = matchMedia("(prefers-color-scheme: dark)");
let chosen = null; // the reader's own choice; else the system's

function setTheme() {
  document.documentElement.dataset.theme = chosen ?? (wanted.matches ? "dark" : "light");
}

document.getElementById("theme").addEventListener("click", () => {
  chosen = dark() ? "light" : "dark";
  setTheme();
  show();
});
wanted.addEventListener("change", () => {
  setTheme();
  show();
});
setTheme();
show();
