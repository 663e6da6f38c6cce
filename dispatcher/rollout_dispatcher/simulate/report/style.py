"""The style sheet of the HTML report; colours are named once, for light and for dark."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --ink: #1b1f24; --soft: #5c6570; --hair: #e4e6e8;
  --window: #1f6feb; --round-robin: #8a6d3b; --greedy: #0f8a6a; --kk: #a0449b;
  --w1: #9cc4f7; --w2: #6ea8f2; --w3: #4389ea; --w4: #1f66cc; --w5: #0b4396;
  --idle: #f3c9ae; --data: #d3d7dc; --arrived: #c9cfd6; --warn: #c2410c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1216; --card: #171b21; --ink: #e8eaed; --soft: #9aa4af; --hair: #2b3139;
    --window: #6aa8ff; --round-robin: #d2b072; --greedy: #3cc7a0; --kk: #dd8ad8;
    --w1: #2f4d78; --w2: #3d6db0; --w3: #5590e0; --w4: #86b6f7; --w5: #c3dcff;
    --idle: #70432c; --data: #3a424c; --arrived: #3d4650; --warn: #fb923c;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 40px 20px 60px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 4px; }
header p, figcaption p { margin: 0 0 2px; color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 12px;
  margin: 28px 0 12px; }
.tile, figure, .rows { background: var(--card); border: 1px solid var(--hair);
  border-radius: 10px; }
.tile { padding: 14px 16px; }
.tile b { display: block; font-size: 24px; font-weight: 650; letter-spacing: -0.01em; }
.tile span { color: var(--soft); font-size: 13px; line-height: 1.35; display: block; }
.advice { border-left: 3px solid var(--window); padding: 2px 0 2px 14px; margin: 20px 0; }
figure, .rows { margin: 20px 0 0; padding: 20px 22px 14px; }
figcaption { margin-bottom: 14px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  fill: var(--soft); font-variant-numeric: tabular-nums; }
svg text.value, svg text.name { fill: var(--ink); }
svg text.name { font-weight: 600; }
svg text.value { paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.grid { stroke: var(--hair); fill: none; }
.axis { stroke: var(--soft); fill: none; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.dashed { stroke-dasharray: 2 6; }
.dot { stroke: var(--card); stroke-width: 2; }
.line.window { stroke: var(--window); } .dot.window { fill: var(--window); }
.line.round-robin { stroke: var(--round-robin); } svg text.round-robin { fill: var(--round-robin); }
.line.greedy { stroke: var(--greedy); } svg text.greedy { fill: var(--greedy); }
.line.kk { stroke: var(--kk); } svg text.kk { fill: var(--kk); }
svg text.window { fill: var(--window); }
.line.w1 { stroke: var(--w1); } .dot.w1 { fill: var(--w1); }
.line.w2 { stroke: var(--w2); } .dot.w2 { fill: var(--w2); }
.line.w3 { stroke: var(--w3); } .dot.w3 { fill: var(--w3); }
.line.w4 { stroke: var(--w4); } .dot.w4 { fill: var(--w4); }
.line.w5 { stroke: var(--w5); } .dot.w5 { fill: var(--w5); }
.line.fair { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 4 4; }
.line.bound { stroke: var(--warn); stroke-width: 1.5; stroke-dasharray: 4 4; }
.work { fill: var(--window); } .idle { fill: var(--idle); } .data { fill: var(--data); }
.arrived { fill: var(--arrived); stroke: none; } .line.arrived { stroke: var(--arrived);
  stroke-width: 10; stroke-linecap: butt; }
.narrow { display: none; }
@media (max-width: 700px) {
  main { padding: 24px 12px 40px; }
  figure, .rows { padding: 14px 12px 10px; }
  .wide { display: none; } .narrow { display: block; }
}
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px;
  width: 100%; }
th, td { text-align: right; padding: 5px 8px; border-bottom: 1px solid var(--hair);
  white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; }
th small { display: block; font-weight: 400; color: var(--soft); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
footer { color: var(--soft); font-size: 13px; margin-top: 24px; }
"""
