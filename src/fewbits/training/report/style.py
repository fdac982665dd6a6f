"""Style sheet and script of the report; both stand inside the page."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --ink: #1d1f23; --soft: #5d636e; --faint: #8b919c;
  --line: #e4e5e3; --grid: #ecedeb; --code: #f3f4f2; --shade: 0 1px 2px rgb(20 22 28 / .05);
  --c1: #2f62c9; --c2: #d2691e; --c3: #24866b; --c4: #7a4fc0;
  --good: #1c7a50; --good-bg: #e2f3ea; --bad: #b3371f; --bad-bg: #fbe9e4; --note: #8a5a00; --note-bg: #fbf1d9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #131518; --card: #1b1e22; --ink: #e8e9eb; --soft: #a3a9b4; --faint: #7b828e;
    --line: #2b2f36; --grid: #262a30; --code: #16191c; --shade: none;
    --c1: #7ba5f7; --c2: #f0a05a; --c3: #5cc4a0; --c4: #b795f2;
    --good: #6fd3a3; --good-bg: #16362a; --bad: #f2937d; --bad-bg: #3d201a;
    --note: #e8c069; --note-bg: #382c12;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 Inter, ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue",
    "Noto Sans", "DejaVu Sans", Arial, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-font-smoothing: antialiased;
}
main { max-width: 1080px; margin: 0 auto; padding: 44px 28px 64px; }
header { margin-bottom: 28px; }
.mark { font-size: 13px; font-weight: 600; letter-spacing: .02em; color: var(--faint); }
h1 {
  font-size: 30px; line-height: 1.2; letter-spacing: -.02em; font-weight: 650; margin: 6px 0 8px;
  overflow-wrap: anywhere;
}
h2 { font-size: 18px; letter-spacing: -.01em; font-weight: 650; margin: 44px 0 14px; }
h3 { font-size: 14px; font-weight: 600; margin: 0; }
.about { color: var(--soft); margin: 0; display: flex; flex-wrap: wrap; gap: 4px 10px; align-items: center; }
.about span:not(:last-child)::after { content: "\\00b7"; margin-left: 10px; color: var(--faint); }
.pill { display: inline-block; font-size: 12.5px; font-weight: 600; padding: 1px 10px; border-radius: 99px; }
.pill.good { color: var(--good); background: var(--good-bg); }
.pill.bad { color: var(--bad); background: var(--bad-bg); }
.pill.note { color: var(--note); background: var(--note-bg); }
.message { border-radius: 10px; padding: 12px 16px; margin: 20px 0 0; }
.message.bad { color: var(--bad); background: var(--bad-bg); }
.message.note { color: var(--note); background: var(--note-bg); }
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px; box-shadow: var(--shade);
}
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 14px; }
.tile { padding: 16px 18px 14px; min-width: 0; }
.tile .name { font-size: 13px; color: var(--soft); }
.tile .value {
  font-size: 25px; line-height: 1.3; letter-spacing: -.02em; font-weight: 620; white-space: nowrap;
}
.tile .value small { font-size: 15px; font-weight: 500; letter-spacing: 0; color: var(--soft); }
.tile .value .from { color: var(--faint); font-weight: 500; }
.tile .more { font-size: 13px; color: var(--faint); min-height: 1.4em; }
.charts { display: grid; grid-template-columns: repeat(2, 1fr); gap: 14px; }
.panel { padding: 16px 16px 8px; min-width: 0; }
.panel.wide { grid-column: 1 / -1; }
.head { display: flex; flex-wrap: wrap; gap: 2px 16px; align-items: baseline; margin: 0 4px 6px; }
.head .unit { color: var(--faint); font-size: 13px; }
.legend { margin-left: auto; display: flex; gap: 14px; font-size: 13px; color: var(--soft); }
.legend i {
  display: inline-block; width: 14px; height: 3px; border-radius: 2px; vertical-align: middle;
  margin-right: 6px;
}
.plot { position: relative; }
.chart { display: block; width: 100%; height: auto; overflow: visible; }
.chart text { font-size: 12px; fill: var(--faint); font-family: inherit; }
.chart .grid { stroke: var(--grid); stroke-width: 1; }
.chart .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.chart .faint { fill: none; stroke-width: 1; opacity: .28; stroke-linejoin: round; }
.chart .cursor { display: none; stroke: var(--faint); stroke-width: 1; stroke-dasharray: 3 3; }
.chart path.c1 { stroke: var(--c1); } .chart path.c2 { stroke: var(--c2); }
.chart path.c3 { stroke: var(--c3); } .chart path.c4 { stroke: var(--c4); }
.chart circle.c1 { fill: var(--c1); } .chart circle.c2 { fill: var(--c2); }
.chart circle.c3 { fill: var(--c3); } .chart circle.c4 { fill: var(--c4); }
.chart circle { stroke: var(--card); stroke-width: 1.5; }
i.c1 { background: var(--c1); } i.c2 { background: var(--c2); }
i.c3 { background: var(--c3); } i.c4 { background: var(--c4); }
.tip {
  position: absolute; top: 4px; pointer-events: none; display: none; padding: 5px 10px; border-radius: 8px;
  font-size: 12.5px; line-height: 1.5; white-space: nowrap; background: var(--ink); color: var(--card);
}
.sample { margin-bottom: 14px; overflow: hidden; }
.sample .prompt {
  padding: 14px 18px; border-bottom: 1px solid var(--line); white-space: pre-wrap; overflow-wrap: anywhere;
}
.answers { display: grid; grid-auto-flow: column; grid-auto-columns: 1fr; }
.answers > div { padding: 12px 18px 16px; min-width: 0; }
.answers > div + div { border-left: 1px solid var(--line); }
.answers .text { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 15em; overflow-y: auto; }
.answers .before .text { color: var(--soft); }
.label {
  font-size: 12.5px; color: var(--faint); display: flex; gap: 8px; align-items: center; min-height: 24px;
}
.empty { color: var(--faint); font-style: italic; }
.settings { display: grid; grid-template-columns: repeat(2, 1fr); gap: 14px; align-items: start; }
table { border-collapse: collapse; width: 100%; }
td, th {
  text-align: left; font-weight: 400; padding: 6px 0; border-top: 1px solid var(--line); vertical-align: top;
}
tr:first-child td, tr:first-child th { border-top: 0; }
th { color: var(--soft); width: 45%; padding-right: 14px; }
td { overflow-wrap: anywhere; }
.card > table, details table { margin: 8px 18px 10px; width: calc(100% - 36px); }
.card > h3 { padding: 14px 18px 0; }
pre {
  font: 12.5px/1.6 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  margin: 0; padding: 14px 18px; overflow-x: auto;
}
details > summary { cursor: pointer; padding: 12px 18px; font-weight: 600; font-size: 14px; }
details > summary + * { border-top: 1px solid var(--line); }
details + details { margin-top: 14px; }
footer { margin-top: 44px; color: var(--faint); font-size: 13px; }
code { font: 12.5px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
@media (max-width: 860px) {
  .tiles { grid-template-columns: repeat(2, 1fr); }
  .charts, .settings { grid-template-columns: minmax(0, 1fr); }
}
.narrow { display: none; }
@media (max-width: 560px) {
  .narrow { display: block; }
  .broad { display: none; }
  main { padding: 28px 16px 48px; }
  .tile .value { font-size: 20px; }
  .answers { grid-auto-flow: row; }
  .answers > div + div { border-left: 0; border-top: 1px solid var(--line); }
}
@media print { body { background: none; } .card { break-inside: avoid; box-shadow: none; } }
"""

# Values under the pointer. All text is set as text, never as markup.
SCRIPT = """
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = JSON.parse(svg.dataset.chart);
  const cursor = svg.querySelector(".cursor");
  const tip = svg.parentElement.querySelector(".tip");
  svg.addEventListener("pointerleave", () => { tip.style.display = cursor.style.display = "none"; });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * chart.width;
    const near = chart.curves.map((curve) => curve.points.reduce(
      (a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    const best = near.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    cursor.setAttribute("x1", best[0]); cursor.setAttribute("x2", best[0]);
    tip.replaceChildren();
    const line = (text) => {
      const row = document.createElement("div"); row.textContent = text; tip.append(row);
    };
    line("step " + best[2].toLocaleString("en"));
    chart.curves.forEach((curve, i) => {
      const label = chart.curves.length > 1 ? curve.label + " " : "";
      if (Math.abs(near[i][0] - best[0]) < 2) line(label + near[i][3]);
    });
    tip.style.display = cursor.style.display = "block";
    const left = best[0] / chart.width * box.width;
    const flip = left > box.width - tip.offsetWidth - 16;
    tip.style.left = (flip ? left - tip.offsetWidth - 10 : left + 10) + "px";
  });
}
"""
