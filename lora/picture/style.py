"""The style sheet of the HTML map. Colours are custom properties, set for both themes by page.py.

What scrolls sideways cuts off also what hangs out above and below: ``around`` gives the values shown at a cell room
there, and takes it back by a margin.
"""

STYLE = """\
body{background:var(--page);color:var(--text);font:14px/1.45 system-ui,sans-serif;margin:24px;max-width:1500px}
h1{font-size:20px;margin:0 0 2px;overflow-wrap:anywhere}
.head,.faint,.meaning,.ruler,.list,.key,dt{color:var(--faint)}
.head{margin:0 0 18px}
.scroll{overflow-x:auto}
.around{padding:80px 0 110px;margin:-80px 0 -98px}
.meaning{margin:0 0 8px;position:relative}
table{border-collapse:collapse}
.map th{font-weight:400;text-align:right;white-space:nowrap;padding:0 8px 0 0}
.map th:first-child{position:sticky;left:0;z-index:1;background:var(--page)}
.map td{box-sizing:border-box;width:17px;min-width:17px;height:17px;padding:0;border:1px solid var(--page);
  position:relative;text-align:center;font-size:11px;line-height:1}
.map .list{text-align:left;font-size:12px;padding:0}
.map .list.gap{padding-left:17px}
.ruler td{font-size:11px;overflow:visible;white-space:nowrap}
.ruler th{font-size:11px;padding-left:14px}
.map .count,.map .mean{width:auto;text-align:right;font-size:13px;padding-left:14px;white-space:nowrap}
.none{background:repeating-linear-gradient(135deg,transparent 0 3px,var(--hatch) 3px 4px)}
.some{background:var(--line)}
.map .beyond,.box.beyond{color:var(--page);font-weight:700}
.map td[data-tip]:hover{outline:2px solid var(--text);outline-offset:-1px;z-index:2}
.map td[data-tip]:hover::after{content:attr(data-tip);position:absolute;left:0;top:21px;z-index:3;white-space:pre-wrap;
  width:max-content;max-width:260px;overflow-wrap:anywhere;font-weight:400;
  text-align:left;font-size:12px;line-height:1.4;padding:6px 9px;border-radius:4px;background:var(--text);
  color:var(--page);pointer-events:none}
.map td.right[data-tip]:hover::after{left:auto;right:0}
.map td.up[data-tip]:hover::after{top:auto;bottom:21px}
.key{display:flex;align-items:center;gap:8px;flex-wrap:wrap;margin:0 0 12px;position:relative}
.ramp{display:inline-flex;width:256px;height:12px}
.ramp i{flex:1}
.box{width:15px;height:15px;margin-left:14px;font-size:11px;line-height:15px;text-align:center}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 14px;margin:18px 0}
dd{margin:0;overflow-wrap:anywhere}
details{margin:8px 0}
summary{cursor:pointer}
.all{margin-top:8px;font-size:13px;font-variant-numeric:tabular-nums}
.all th,.all td{border-bottom:1px solid var(--line);padding:2px 14px 2px 0;text-align:left}
"""
