// ECharts in the page's own colours. A chart is made anew when what it shows, or the theme, changes.
const charts = new Map();

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function dark() {
  return document.documentElement.dataset.theme === "dark";
}

function colourOf(gpu, provider) {
  const pair = DATA[gpu].colours[provider];
  return pair ? pair[dark() ? 1 : 0] : css("--muted");
}

function draw(element, option, onClick) {
  charts.get(element)?.dispose();
  const chart = echarts.init(element, null, { renderer: "canvas" });
  charts.set(element, chart);
  const axis = {
    axisLine: { lineStyle: { color: css("--line") } },
    axisTick: { show: false },
    axisLabel: { color: css("--muted"), fontSize: 11, hideOverlap: true },
    nameTextStyle: { color: css("--muted"), fontSize: 11, align: "left" },
    splitLine: { lineStyle: { color: css("--line") } },
  };
  const base = {
    animation: false,
    textStyle: { fontFamily: css("--sans"), color: css("--text") },
    grid: { left: 8, right: 16, top: 36, bottom: 8, containLabel: true },
    tooltip: {
      confine: true, backgroundColor: css("--surface"), borderColor: css("--line"), textStyle: { color: css("--text"), fontSize: 12 },
    },
  };
  const styled = { ...base, ...option, xAxis: { ...axis, splitLine: { show: false }, ...option.xAxis }, yAxis: { ...axis, ...option.yAxis } };
  chart.setOption(styled);
  if (onClick) chart.on("click", onClick);
  return chart;
}

function escapeHtml(text) {
  return String(text).replace(/[&<>"']/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c]);
}

function microseconds(us) {
  return us < 10 ? us.toFixed(2) : us.toFixed(1);
}

function titleOf(item) {
  return [item.rows, item.heads, item.dtypes, item.pages, item.options].filter(Boolean).join(", ");
}

// Our ratio to the limit of every visible case, by commit; changed points are filled.
function drawOverview(state, visible) {
  const element = document.querySelector(`.gpu[data-gpu="${CSS.escape(state.gpu)}"] .overview`);
  const gpu = DATA[state.gpu];
  const labels = gpu.revisions.map(([label]) => label);
  const series = [];
  for (const item of Object.values(gpu.cases)) {
    if (!visible.has(item.name)) continue;
    const changed = new Set(item.changes.filter((change) => change.provider === "ours" && change.metric === "device").map((change) => change.new));
    const newest = new Map((item.history.ours ?? []).filter((run) => run.ratio).map((run) => [run.revision, run]));
    const data = [...newest].map(([label, run]) => ({
      value: [label, run.ratio, item.name],
      symbolSize: changed.has(label) ? 8 : 5,
      itemStyle: changed.has(label) ? { color: css("--accent"), opacity: 1 } : { color: css("--muted"), opacity: 0.45 },
    }));
    if (data.length) series.push({ type: "line", data, lineStyle: { color: css("--muted"), opacity: 0.25, width: 1 }, symbol: "circle" });
  }
  draw(
    element,
    {
      xAxis: { type: "category", data: labels, boundaryGap: true },
      yAxis: { type: "value", scale: true, min: (range) => Math.min(1, range.min), name: "ratio to limit" },
      tooltip: {
        confine: true, backgroundColor: css("--surface"), borderColor: css("--line"), textStyle: { color: css("--text"), fontSize: 12 },
        formatter: (point) => `${escapeHtml(titleOf(gpu.cases[point.value[2]]))}<br>${escapeHtml(point.value[0])}: <b>${point.value[1].toFixed(3)}</b>`,
      },
      series,
    },
    (point) => go({ ...readState(), case: point.value[2] }, true),
  );
}

// A dashed line across a chart.
function limitAt(value) {
  return { silent: true, symbol: "none", animation: false, label: { show: false }, lineStyle: { type: "dashed", color: css("--muted") }, data: [{ yAxis: value }] };
}

const UNITS = { us: "us", ratio: "ratio to limit", tflops: "TFLOPS" };

// Every provider's history on one case: medians, 20th to 80th percentile, and the changes that the gate calls. The limit's newest rate is a line.
function drawHistory(element, gpuName, item, metric) {
  const gpu = DATA[gpuName];
  const series = [];
  for (const [provider, runs] of Object.entries(item.history)) {
    const timed = runs.filter((run) => run[metric]);
    if (!timed.length || (metric === "ratio" && provider === item.floor)) continue;
    const colour = colourOf(gpuName, provider);
    const changed = new Set(item.changes.filter((change) => change.provider === provider && change.metric === "device").map((change) => change.new));
    series.push({
      name: gpu.providers[provider] ?? provider, type: "line", symbol: "circle", color: colour,
      lineStyle: { width: provider === "ours" ? 2.5 : 1.5 },
      ...(metric === "tflops" && provider === item.floor && { markLine: limitAt(timed.at(-1).tflops) }),
      data: timed.map((run) => ({
        value: [run.revision, run[metric]],
        symbolSize: changed.has(run.revision) ? 12 : 6,
        itemStyle: changed.has(run.revision) ? { borderColor: css("--text"), borderWidth: 2 } : {},
      })),
    });
    if (metric === "us") {
      const ends = timed.flatMap((run) => [[run.revision, run.p20], [run.revision, run.p80], ["-", "-"]]);
      series.push({ type: "line", data: ends, symbol: "none", silent: true, color: colour, lineStyle: { width: 4, opacity: 0.3 }, tooltip: { show: false } });
    }
  }
  draw(element, {
    xAxis: { type: "category", data: gpu.revisions.map(([label]) => label), boundaryGap: true },
    yAxis: { type: "value", scale: true, name: UNITS[metric], ...(metric === "ratio" && { min: (range) => Math.min(1, range.min) }) },
    legend: { type: "scroll", top: 0, right: 0, itemWidth: 12, itemHeight: 8, icon: "roundRect", textStyle: { color: css("--muted") }, data: series.filter((one) => one.name).map((one) => one.name) },
    series,
  });
}

// The time of every replay, in the order in which they ran.
function drawSamples(element, gpuName, item) {
  const gpu = DATA[gpuName];
  const series = Object.entries(item.results)
    .filter(([, result]) => result.samples.length)
    .map(([provider, result]) => ({
      name: gpu.providers[provider] ?? provider, type: "scatter", symbolSize: 6, color: colourOf(gpuName, provider),
      data: result.samples.map((us, index) => [index + 1, us]),
    }));
  draw(element, {
    xAxis: { type: "value", name: "replay", nameLocation: "middle", nameGap: 24, min: 0, max: (range) => range.max + 1, minInterval: 1 },
    yAxis: { type: "value", scale: true, name: "us" },
    legend: { type: "scroll", top: 0, right: 0, itemWidth: 12, itemHeight: 8, textStyle: { color: css("--muted") } },
    series,
  });
}
