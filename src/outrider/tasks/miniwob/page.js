// At the end of a page of MiniWoB: one episode, begun by itself, whose reward becomes the window's title.
(function () {
  const seed = SEED;
  const titled = (text) => { document.title = "miniwob-" + text; };
  const end = core.endEpisode;

  // The first result counts: a page that is loaded again shows it, and no other episode begins.
  function finish(reward) {
    document.body.innerHTML = "<p>This task has ended.</p>";
    titled("reward " + Math.min(1, Math.max(0, reward)) + " " + reward);
  }

  core.endEpisode = function (...how) {
    if (core.EP_TIMER === null) return;
    end.apply(core, how);
    localStorage.setItem("reward", WOB_RAW_REWARD_GLOBAL);
    finish(WOB_RAW_REWARD_GLOBAL);
  };

  // The page's own timer would end the episode before an agent has looked at it; the task has limits of its own.
  core.EPISODE_MAX_TIME = 2 ** 31 - 1;

  Math.seedrandom(seed);
  window.addEventListener("load", () => {
    const earned = localStorage.getItem("reward");
    if (earned !== null) return finish(Number(earned));
    Math.seedrandom(seed);
    core.startEpisodeReal();
    core.hideDisplay();
    titled("open");
  });

  // In a window without tabs the page gets all keys first, those of the browser too: only keys for editing are left.
  const plain = /^([acvxyz]|Arrow.*|Home|End|Backspace|Delete|Control|Shift)$/i;
  const shifted = /^(z|Arrow.*|Home|End|Control|Shift)$/i;
  const refused = (event) =>
    event.altKey ||
    event.metaKey ||
    /^(F\d+|Browser.*)$/.test(event.key) ||
    (event.ctrlKey && !(event.shiftKey ? shifted : plain).test(event.key)) ||
    (event.shiftKey && /^(Escape|Delete)$/.test(event.key));
  window.addEventListener("keydown", (event) => { if (refused(event)) event.preventDefault(); }, true);
  window.addEventListener("contextmenu", (event) => event.preventDefault(), true);
  window.addEventListener("auxclick", (event) => event.preventDefault(), true);
})();
