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

  function draw(chart, width) {
    const figure = figures[chart.dataset.figure];
    const layout = themed(figure.layout), edge = colour("card");
    for (const key of axes(layout)) {  // a zoom outlasts another theme
      const now = chart.layout?.[key];
      if (now && now.autorange !== true) layout[key].range = [...now.range];
    }
    for (const trace of figure.data) {
      if (trace.marker?.line) trace.marker.line.color = edge;
      if (trace.name === "bubble") trace.marker.color = colour("bubble");  // no work: not the brightest
    }
    if (width) Object.assign(layout, { width, autosize: false });
    const isNarrow = (width || chart.clientWidth) < NARROW_PX;
    if (isNarrow && layout.showlegend !== false) {  // a column, above the chart
      const kinds = figure.data.filter((trace) => trace.showlegend !== false).length;
      const more = Math.max(0, kinds - 1) * LEGEND_PX;
      layout.height += more;
      layout.margin.t += more;
      layout.legend.maxheight = more + 2 * LEGEND_PX;
    }
    const displayModeBar = isNarrow ? false : "hover";  // the legend has its place
    return Plotly.react(chart, figure.data, layout, { ...config, displayModeBar, responsive: !width });
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

  wear(wanted());
  drawAll().then(() => { root.dataset.ready = "true"; });
})();
