"use strict";
// Draws the charts in the colours of the page, dark or light, and once more for paper.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const charts = [...document.querySelectorAll(".chart")];
  const root = document.documentElement, button = document.getElementById("theme");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const PAPER_PX = 1010, NARROW_PX = 600, LEGEND_PX = 21;
  const config = {
    displaylogo: false,
    doubleClickDelay: 600,  // a large page, or a busy machine, is slow to see the second click
    responsive: true,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };
  let chosen = null;
  try { chosen = localStorage.getItem("penstock-theme"); } catch { /* kept for this visit only */ }

  const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const fontPx = () => Math.max(11, Math.round(0.8 * parseFloat(getComputedStyle(root).fontSize)));
  const axes = (layout) => Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key));

  function themed(layout) {
    const ink = colour("ink"), grid = colour("grid"), line = colour("line");
    const found = structuredClone(layout);
    found.paper_bgcolor = found.plot_bgcolor = "rgba(0,0,0,0)";
    found.font = { family: getComputedStyle(document.body).fontFamily, size: fontPx(), color: ink };
    found.hoverlabel = { ...found.hoverlabel, bgcolor: colour("card"), bordercolor: line, font: { color: ink } };
    found.modebar = { bgcolor: "rgba(0,0,0,0)", color: colour("quiet"), activecolor: ink };
    for (const key of axes(found)) {
      found[key] = { gridcolor: grid, linecolor: line, tickcolor: line, zeroline: false, ...found[key] };
    }
    for (const shape of found.shapes ?? []) {
      if (shape.name === "ground") shape.fillcolor = colour("ground");
      if (shape.name === "limit") shape.line.color = colour("limit");
    }
    return found;
  }

  // Curves by the switches of their section: a log scale, and a running mean over a faint curve.
  function switched(chart, data, layout) {
    const section = chart.closest("section");
    const weight = parseFloat(section.querySelector(".smooth").value);
    const isLog = section.querySelector(".log").checked && data.every((trace) => trace.y.every((y) => y > 0));
    layout.yaxis = { ...layout.yaxis, type: isLog ? "log" : "linear" };
    if (!weight) return data;
    const faint = data.map((trace) => ({ ...trace, opacity: 0.3, showlegend: false, hoverinfo: "skip", hovertemplate: null }));
    return [...faint, ...data.map((trace) => ({ ...trace, mode: "lines", y: smoothed(trace.y, weight) }))];
  }

  function smoothed(values, weight) {  // without the pull of a first value
    let sum = 0, total = 0;
    return values.map((value) => {
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  }

  function draw(chart, width) {
    const figure = figures[chart.dataset.figure];
    const layout = themed(figure.layout), edge = colour("card");
    for (const key of axes(layout)) {  // a zoom outlasts another theme
      const now = chart.layout?.[key];
      if (now && now.autorange !== true) layout[key].range = [...now.range];
    }
    const data = chart.dataset.meta === "curve" ? switched(chart, figure.data, layout) : figure.data;
    for (const trace of data) {
      if (trace.name === "messages") trace.line.color = trace.marker.color = colour("ink");
      if (trace.marker?.line) trace.marker.line.color = edge;
      if (trace.name === "bubble") trace.marker.color = colour("bubble");  // no work: not the brightest
    }
    if (width) Object.assign(layout, { width, autosize: false });
    const isNarrow = (width || chart.clientWidth) < NARROW_PX;
    if (isNarrow && layout.showlegend !== false) {  // a column, above the chart
      const kinds = data.filter((trace) => trace.showlegend !== false).length;
      const more = Math.max(0, kinds - 1) * LEGEND_PX;
      layout.height += more;
      layout.margin.t += more;
      layout.legend.maxheight = more + 2 * LEGEND_PX;
    }
    for (const note of isNarrow ? layout.annotations ?? [] : []) {
      if (note.xref === "paper") note.xshift = 4 - layout.margin.l;  // captions need the whole width
    }
    const displayModeBar = isNarrow ? false : "hover";  // the legend has its place
    return Plotly.react(chart, data, layout, { ...config, displayModeBar, responsive: !width });
  }

  function wear(theme) {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "light" : "dark";
  }

  const wanted = () => chosen ?? (dark.matches ? "dark" : "light");
  const drawAll = (width) => Promise.all(charts.map((chart) => draw(chart, width)));

  button.addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("penstock-theme", chosen); } catch { /* as above */ }
    wear(chosen);
    drawAll();
  });
  dark.addEventListener("change", () => { wear(wanted()); drawAll(); });
  window.addEventListener("beforeprint", () => {
    wear("light");
    const wide = charts.filter((chart) => !chart.closest(".grid"));
    const small = charts.filter((chart) => chart.closest(".grid"));
    wide.forEach((chart) => draw(chart, PAPER_PX));
    small.forEach((chart) => draw(chart, PAPER_PX / 2 - 20));
  });
  window.addEventListener("afterprint", () => { wear(wanted()); drawAll(); });

  // Charts of one step show the same time: zoom and pan move all, by mouse and by keys.
  const ofStep = charts.filter((chart) => chart.dataset.meta === "step");
  const whole = (chart) => figures[chart.dataset.figure].layout.xaxis.range;
  const alike = (chart) => ofStep.filter((other) => String(whole(other)) === String(whole(chart)));

  function show(chart, range) {
    for (const other of alike(chart)) {
      if (String(other.layout.xaxis.range) !== String(range)) Plotly.relayout(other, { "xaxis.range": [...range] });
    }
  }

  function keyed(chart, key) {
    const [from, to] = chart.layout.xaxis.range, [first, last] = whole(chart);
    const length = to - from;
    const factor = { "+": 0.5, "=": 0.5, "-": 2 }[key], move = { ArrowLeft: -0.25, ArrowRight: 0.25 }[key];
    if (key === "0") return [first, last];
    if (!factor && !move) return null;
    const wanted = Math.min(length * (factor ?? 1), last - first);
    const start = (from + to) / 2 - wanted / 2 + (move ?? 0) * length;
    const inside = Math.max(first, Math.min(start, last - wanted));
    return [inside, inside + wanted];
  }

  function listen() {
    for (const chart of ofStep) {
      chart.on("plotly_relayout", () => show(chart, chart.layout.xaxis.range));
      chart.on("plotly_doubleclick", () => show(chart, whole(chart)));
      chart.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        const range = keyed(chart, event.key);
        if (!range) return;
        event.preventDefault();
        show(chart, range);
      });
    }
    for (const section of document.querySelectorAll("section:has(.switches)")) {
      section.querySelector(".switches").addEventListener("input", () => {
        section.querySelector("output").textContent = section.querySelector(".smooth").value;
        section.querySelectorAll(".chart").forEach((chart) => {
          delete chart.layout.yaxis.range;
          draw(chart);
        });
      });
    }
  }

  // A table that is too wide says so, and takes the arrow keys.
  function measureTables() {
    for (const box of document.querySelectorAll(".wide")) {
      const isWide = box.scrollWidth > box.clientWidth;
      box.previousElementSibling.hidden = !isWide;
      isWide ? box.setAttribute("tabindex", "0") : box.removeAttribute("tabindex");
    }
  }
  window.addEventListener("resize", measureTables);

  measureTables();
  wear(wanted());
  drawAll().then(listen).then(() => { root.dataset.ready = "true"; });
})();
