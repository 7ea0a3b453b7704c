// The style of the report, and its own explanations.
#pragma once

namespace shardlib::run::detail {

/// How to read and use the charts.
inline constexpr const char* report_help =
    "Strong curves are means (medians of speeds, times and memory) over 2 % of what is shown; the steps' own values "
    "are faint behind. Upright dotted lines, short ones if there are many, mark events, such as a restart; they are "
    "listed below. "
    "Drag over a chart to zoom in; a double click shows the whole range again. <span "
    "class=\"keyboard\">With "
    "the keyboard, in a chart: arrows, Page Up, Page Down, Home and End read values; + and - zoom, Shift and an arrow "
    "move, Escape shows the whole range.</span>";

// Lines, areas and texts have a contrast of 3:1 and more with what is behind them, and colors of neighboring numbers
// differ for people who cannot tell red from green, too: run_report.py computes both. c: runs, p: parts.
inline constexpr const char* report_style = R"css(
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1b1f24;--dim:#5b6472;--line:#e3e6ea;--mark:#fff3c4;
--c0:#0b68c4;--c1:#d9570a;--c2:#0a8a5f;--c3:#93226f;--c4:#8a6d00;--c5:#7a5cf0;--c6:#b01030;--c7:#4b5563;
--p0:#2f78c2;--p1:#8a4312;--p2:#2c9a78;--p3:#7b2f6b;--p4:#a08400;--p5:#4a3fae;--p6:#d0566a;--p7:#3f4856}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1d2126;--ink:#e6e9ed;--dim:#a3adba;--line:#333a43;
--mark:#4a4220;--c0:#5eb0ff;--c1:#ff9a52;--c2:#2fb185;--c3:#f5a6dc;--c4:#d9bd4a;--c5:#8f7bf5;--c6:#f2556f;--c7:#b9c2cd;
--p0:#4c8fd6;--p1:#f0b184;--p2:#3f9a7c;--p3:#f0b6e2;--p4:#a08a35;--p5:#c3bdff;--p6:#c4596b;--p7:#c3cad3}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif}
main{max-width:1360px;margin:0 auto;padding:24px 20px 60px}
html{scroll-padding-top:52px}
h1{font-size:24px;margin:0 0 4px;font-weight:650;overflow-wrap:anywhere}
h2{font-size:17px;margin:34px 0 12px;font-weight:650}
p.sub{margin:0 0 18px;color:var(--dim)}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:16px}
.grid2>.card:last-child:nth-child(odd){grid-column:1/-1}
.card,.box{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:0;padding:12px 14px}
.card{position:relative}
.box{overflow-x:auto}
figcaption{display:flex;flex-wrap:wrap;align-items:center;gap:4px 12px;min-height:26px;margin-bottom:4px}
figcaption b{font-weight:600}
.plot{position:relative;height:290px;cursor:crosshair;touch-action:pan-y;user-select:none;-webkit-user-select:none;
border-radius:4px}
.plot>svg{position:absolute;inset:0;width:100%;height:100%;overflow:hidden}
.plot text{font-size:12.5px;fill:var(--dim);font-variant-numeric:tabular-nums}
:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
path{fill:none;stroke-linejoin:round;stroke-linecap:round}
.grid{stroke:var(--line)}
.plot:focus-visible{outline-offset:-2px}
.raw{opacity:.3}
.band{opacity:.25;stroke:none}
.smooth{stroke-width:2}
.marked{stroke-width:1.8;stroke-dasharray:6 4}
.dot{stroke-width:7}
.note{stroke-width:1.5;stroke-dasharray:2 4}
.area{stroke:var(--card);stroke-width:1.5}
.cursor,.chosen{position:absolute;pointer-events:none}
.cursor{width:0;border-left:1px dashed var(--dim)}
.chosen{background:var(--c0);opacity:.2}
.bar{display:flex;flex-wrap:wrap;gap:8px 18px;align-items:center;margin:0 0 10px;font-size:13px;color:var(--dim)}
.bar label,.bar>span{display:inline-flex;flex-wrap:wrap;gap:6px;align-items:center}
.bar:not(:empty){position:sticky;top:0;z-index:3;background:var(--bg);padding:6px 0}
button{font:inherit;font-size:13px;line-height:1.4;padding:2px 11px;border:1px solid var(--dim);border-radius:20px;
background:transparent;color:var(--dim);cursor:pointer}
button[aria-pressed=true]{background:var(--line);color:var(--ink)}
.toggle[aria-pressed=false]{text-decoration:line-through}
.toggle[aria-pressed=false] i{opacity:.25}
.views{margin-left:auto;display:inline-flex;border:1px solid var(--dim);border-radius:20px;overflow:hidden}
.bar .views{margin:0;gap:0}
.views button{border:0;border-radius:0;padding:1px 11px}
.views button:focus-visible{outline-offset:-3px;border-radius:20px}
.values{margin:6px 0 0;font-size:13px;color:var(--dim);overflow-x:auto}
.values summary{font-weight:400}
.values td,.values th{padding:2px 10px 2px 0}
.values td:first-child{white-space:nowrap}
button i{vertical-align:-1px}
.live{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.readout{position:absolute;z-index:2;pointer-events:none;background:var(--card);border:1px solid var(--line);
border-radius:8px;padding:6px 10px;font-size:13px;box-shadow:0 3px 14px rgba(0,0,0,.18);max-width:100%;
font-variant-numeric:tabular-nums}
.readout div{display:flex;gap:8px;align-items:center}
.readout span:last-child{margin-left:auto;padding-left:12px}
.key{white-space:nowrap}
.run,button{overflow-wrap:anywhere}
.readout span:last-child,.summary td.num{white-space:nowrap}
.summary td:first-child{min-width:9ch}
.keys{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px;color:var(--dim)}
i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;flex:none}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--dim);font-size:13px}
tr:last-child td{border-bottom:0}
td.num,th.num{text-align:right}
th,td{min-width:56px}
td.step,th.step{width:1px}
.sections{columns:2 400px;column-gap:36px}
.sections table{table-layout:fixed;break-inside:avoid;margin-bottom:14px}
.sections th:first-child{width:48%}
main>.box+.box{margin-top:12px}
td:first-child code{white-space:nowrap}
td code{font:13px/1.4 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
tr.differs td{background:var(--mark)}
tr.differs td:first-child{box-shadow:-8px 0 0 var(--mark)}
details{margin:6px 0}
summary{cursor:pointer;font-weight:600}
pre{margin:8px 0 4px;padding:10px 12px;background:var(--bg);border-radius:8px;white-space:pre-wrap;overflow-wrap:anywhere;
font:13px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre b{color:var(--dim);font-weight:400}
@media (max-width:900px){
.summary{font-size:14px}
.summary td,.summary th{min-width:0;padding-right:9px}
.summary td:last-child,.summary th:last-child{padding-right:0}
}
@media (max-width:600px){
main{padding:16px 10px 40px}
.card,.box{padding:10px}
.plot{height:240px}
.bar:not(:empty){position:static}
.views button,button{padding:5px 12px}
.summary,.summary tbody,.summary tr,.summary td{display:block}
.summary tr:first-child{display:none}
.summary tr{padding:6px 0}
.summary td,.summary td.num{display:flex;justify-content:space-between;gap:12px;text-align:left;padding:3px 0;border:0}
.summary td::before{content:attr(data-label);color:var(--dim)}
.summary td:first-child{display:block;font-weight:600}
.keyboard{display:none}
.key{white-space:normal}
}
@media print{.bar,.views,.live{display:none}}
)css";

}  // namespace shardlib::run::detail
