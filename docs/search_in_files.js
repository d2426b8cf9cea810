// The search of the theme runs in a worker, which browsers refuse to pages that are opened as files. There, this class
// takes the place of Worker and runs the same script in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const page = this.frame.contentDocument;
      page.open();
      page.write(`<body><script>postMessage = (data) => parent.postMessage(data, "*")</script></body>`);
      page.close();
      const script = page.createElement("script");
      script.src = new URL(url, location.href);
      this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
      page.body.append(script);
      addEventListener("message", (event) => {
        if (event.source === this.frame.contentWindow || event.source === window) {
          this.dispatchEvent(new MessageEvent("message", { data: event.data }));
        }
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
