// One case in a dialog: everyone's time, the history, the raw samples, the host times.
const dialog = document.getElementById("case");
const body = document.getElementById("case-body");
let opener = null;
let metric = "ratio";

const notMeasured = '<span class="none">not measured</span>';

function behind(us, faster) {
  return `<span>${us === null ? notMeasured : microseconds(us) + `<small>${faster === null ? "" : faster.toFixed(2) + "×"}</small>`}</span>`;
}

function resultRow(gpuName, item, provider, result, slowest) {
  const name = escapeHtml(DATA[gpuName].providers[provider] ?? provider);
  const version = `<small>${escapeHtml(result.version)} · ${escapeHtml(result.revision)}</small>`;
  if (result.us === null) {
    return `<tr><th scope="row">${name}${version}</th><td colspan="6" data-label="why not"><span class="none">${escapeHtml(result.reason)}</span></td></tr>`;
  }
  const bar = `<span class="bar" aria-hidden="true"><i style="width:${(100 * result.us) / slowest}%;--fill:${colourOf(gpuName, provider)}"></i></span>`;
  const error = result.error === null ? '<span class="none">no result</span>' : `${result.error.toExponential(1)}<small>${result.error_ratio === null ? "" : result.error_ratio.toFixed(2) + " of PyTorch's"}${result.relative_error === null ? "" : `<br>relative <span class="whole">${result.relative_error.toExponential(1)}</span>` + (result.sampled ? ", of an older gate's sampled rows" : "")}</small>`;
  return `<tr><th scope="row">${name}${version}</th>
    <td data-label="us"><span>${microseconds(result.us)}<small>${microseconds(result.p20)} to ${microseconds(result.p80)}</small></span>${bar}</td>
    <td class="num" data-label="ratio to ${item.floor}"><span>${result.tflops === null ? "" : result.tflops.toFixed(0) + " TFLOPS "}${result.ratio === null || (item.long && result.tflops === null) ? notMeasured : result.ratio.toFixed(3)}</span></td>
    <td class="num" data-label="over ours, same run"><span>${result.faster === null ? notMeasured : result.faster.toFixed(2) + "×"}</span></td>
    <td class="num" data-label="in a stream">${behind(result.in_stream, result.in_stream_faster)}</td>
    <td class="num" data-label="behind weights">${behind(result.behind_weights, result.behind_weights_faster)}</td>
    <td class="num" data-label="error"><span>${error}</span></td></tr>`;
}

function caseHtml(gpuName, item) {
  const results = Object.entries(item.results);
  const order = ["ours", ...Object.keys(DATA[gpuName].providers)];
  results.sort(([a], [b]) => order.indexOf(a) - order.indexOf(b));
  const slowest = Math.max(...results.map(([, result]) => result.us ?? 0));
  const bar = item.bar ? `bar ${item.bar}: ${item.bar_met === null ? "not measured" : item.bar_met ? "met" : "missed"}` : "no bar";
  const sampled = results.some(([, result]) => result.samples.length);
  const changes = item.changes.map((change) => `<li>${escapeHtml(change.new)} after ${escapeHtml(change.base)}: ${escapeHtml(DATA[gpuName].providers[change.provider] ?? change.provider)}${change.metric === "device" ? "" : ", " + escapeHtml(change.metric)}
    <span class="verdict ${change.verdict}">${change.ratio > 1 ? "+" : "\u2212"}${Math.abs(100 * (change.ratio - 1)).toFixed(1)}% ${change.verdict}</span></li>`);
  const host = Object.entries(item.host).map(([step, us]) => `<div><dt>${escapeHtml(step)}</dt><dd>${microseconds(us)} us</dd></div>`);
  const details = results.map(([provider, result]) => `<div><dt>${escapeHtml(DATA[gpuName].providers[provider] ?? provider)}</dt>
    <dd>${escapeHtml(result.details || "no details")}<small>${escapeHtml(result.time)} UTC, ${escapeHtml(result.source)}</small></dd></div>`);
  return `<header><div><h2 id="case-title">${escapeHtml(titleOf(item))}</h2>
    <p class="muted">${item.megabytes.toFixed(1)} MB of K and V, ${escapeHtml(bar)}</p><p class="muted name"><code>${escapeHtml(item.name)}</code></p></div>
    <div class="tools"><button type="button" id="copy">Copy link</button><button type="button" id="close" aria-label="Close">✕</button></div></header>
  <h3>Results</h3>
  <table class="plain"><thead><tr><th scope="col">who</th><th scope="col">us, 20th to 80th percentile</th><th scope="col" class="num">${item.long ? "TFLOPS, " : ""}ratio to ${item.floor}</th>
    <th scope="col" class="num">over ours, same run</th><th scope="col" class="num">in a stream</th><th scope="col" class="num">behind weights</th><th scope="col" class="num">error</th></tr></thead>
    <tbody>${results.map(([provider, result]) => resultRow(gpuName, item, provider, result, slowest)).join("")}</tbody></table>
  <h3>History <span class="toggle" role="group" aria-label="Unit of the history"><button type="button" data-metric="ratio">${item.long ? "TFLOPS" : "ratio"}</button><button type="button" data-metric="us">us</button></span></h3>
  <div class="chart" id="case-history" role="img" aria-label="History of every provider by commit"></div>
  ${changes.length ? `<ul class="muted">${changes.join("")}</ul>` : '<p class="none">no change was called</p>'}
  <h3>Samples</h3>
  ${sampled ? '<div class="chart" id="case-samples" role="img" aria-label="Time of every replay"></div>' : '<p class="none">samples not recorded: this record holds percentiles only</p>'}
  <h3>Host time and steps beside the call</h3>
  ${host.length ? `<dl class="facts">${host.join("")}</dl>` : '<p class="none">not measured</p>'}
  <h3>How it ran</h3><dl class="facts long">${details.join("")}</dl>`;
}

function drawCase(gpuName, item) {
  for (const button of body.querySelectorAll("[data-metric]")) button.setAttribute("aria-pressed", button.dataset.metric === metric);
  drawHistory(document.getElementById("case-history"), gpuName, item, metric === "ratio" && item.long ? "tflops" : metric);
  const samples = document.getElementById("case-samples");
  if (samples) drawSamples(samples, gpuName, item);
}

function showCase(state) {
  const item = DATA[state.gpu].cases[state.case];
  if (!state.case || !item) {
    if (dialog.open) dialog.close();
    if (state.case) document.getElementById("count").textContent = `the link's case ${state.case} is not recorded`;
    return;
  }
  body.innerHTML = caseHtml(state.gpu, item);
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  drawCase(state.gpu, item);
}

body.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.id === "close") dialog.close();
  if (button.dataset.metric) {
    metric = button.dataset.metric;
    const state = readState();
    drawCase(state.gpu, DATA[state.gpu].cases[state.case]);
  }
  if (button.id === "copy") {
    button.textContent = await navigator.clipboard.writeText(location.href).then(() => "Copied", () => "Copy the address bar");
  }
});
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
dialog.addEventListener("close", () => {
  for (const id of ["case-history", "case-samples"]) {
    const element = document.getElementById(id);
    charts.get(element)?.dispose();
    charts.delete(element);
  }
  body.replaceChildren();
  const state = readState();
  if (state.case) go({ ...state, case: "" }, true);
  opener?.focus();
});
